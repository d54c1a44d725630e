//! The CPU engine: sums, digests and scaling, on threads and in SIMD.

mod block;
mod digest;
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

pub use digest::digest_each;
pub use scale::{clamp, scale};
pub use simd::{Simd, detect};
pub use sum::{Pass, sum, sum_each};
pub use threads::{Threads, prepare};
