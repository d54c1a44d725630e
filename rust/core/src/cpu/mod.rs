//! The CPU engine: sums and scaling over the chunks of a plan, on threads and in SIMD.

mod block;
pub mod digest;
mod element;
mod extremes;
pub mod float_mode;
mod magnitude;
mod powers;
mod read;
mod scale;
mod simd;
mod sum;
mod threads;
mod vector;
mod window;

pub use scale::{clamp, scale};
pub use simd::{Simd, detect};
pub use sum::{Pass, sum, sum_each};
pub use threads::Threads;
