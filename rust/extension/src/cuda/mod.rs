//! The CUDA engine's part in Rust: the driver, devices, kernels, and the work lists they walk.

mod device;
mod driver;
mod kernel;
mod launches;
mod work_list;

pub use device::{architecture, current_stream};
pub use kernel::Kernel;
pub use launches::Launches;
pub use work_list::{WorkList, digest_lists, segments_of, work_lists};
