//! The CUDA engine's part in Rust: the driver, kernels, and the work lists they walk.

mod driver;
mod kernel;
mod work_list;

pub use kernel::{Kernel, architecture};
pub use work_list::{WorkList, segments_of, work_lists};
