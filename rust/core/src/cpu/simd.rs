//! One generic body, compiled once for each instruction set and chosen at run time.
//!
//! A kernel is generic over the set's [`Vector`], or plain Rust over small arrays; inlined into a `#[target_feature]`
//! function it becomes that set's code. The results need no care: every set computes the same exact sums.

use std::sync::OnceLock;

#[cfg(target_arch = "x86_64")]
use super::vector::{Avx2, Avx512};
use super::vector::{Pair, Vector};

/// An instruction set that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Simd {
    /// What the target has without asking: SSE2 on x86-64, NEON with fused multiply-add on Arm.
    Baseline,
    /// AVX2, FMA, F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ and VL beside AVX2.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Simd {
    /// The name that diagnostics print.
    pub const fn name(self) -> &'static str {
        match self {
            Simd::Baseline if cfg!(target_arch = "aarch64") => "neon",
            Simd::Baseline => "portable",
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512 => "avx512",
        }
    }

    /// Lanes of its vectors of float64.
    pub const fn width(self) -> usize {
        match self {
            Simd::Baseline => Pair::WIDTH,
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 => Avx2::WIDTH,
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512 => Avx512::WIDTH,
        }
    }
}

/// Work over one block. `run` must be `#[inline(always)]`, or it is not compiled for the instruction set.
pub trait Kernel {
    /// What the work yields.
    type Output;

    /// Does the work with vectors of the instruction set.
    fn run<V: Vector>(self) -> Self::Output;
}

/// The best instruction set of this machine.
pub fn detect() -> Simd {
    static BEST: OnceLock<Simd> = OnceLock::new();
    *BEST.get_or_init(best)
}

#[cfg(target_arch = "x86_64")]
fn best() -> Simd {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    match (avx2, avx512) {
        (true, true) => Simd::Avx512,
        (true, false) => Simd::Avx2,
        _ => Simd::Baseline,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn best() -> Simd {
    Simd::Baseline
}

/// Runs `kernel` as compiled for `simd`, which this machine must have: pass what [`detect`] gave, or less.
#[inline]
pub fn dispatch<K: Kernel>(simd: Simd, kernel: K) -> K::Output {
    match simd {
        Simd::Baseline => kernel.run::<Pair>(),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Avx2` comes from `detect`, which found these features on this machine.
        Simd::Avx2 => unsafe { with_avx2(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Avx512` comes from `detect`, which found these features on this machine.
        Simd::Avx512 => unsafe { with_avx512(kernel) },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn with_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx2>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn with_avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512>()
}
