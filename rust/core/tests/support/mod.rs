//! Exact arithmetic to compare with, and chunks over slices.

#![allow(dead_code, reason = "each test file uses its part")]

use gradclip_core::cpu::{Pass, Simd, Threads, detect, sum};
use gradclip_core::dtype::DType;
use gradclip_core::exact::Sums;
use gradclip_core::finish::{scale_from, total};
use gradclip_core::norm::NormKind;
use gradclip_core::plan::Chunk;
use half::{bf16, f16};
use num_bigint::BigUint;
use num_traits::{One, Zero};

/// Everything is an integer multiple of 2^UNIT here: squares of float64 subnormals.
pub const UNIT: i64 = -2148;

/// An element type with its dtype.
pub trait Number: Copy {
    const DTYPE: DType;
    fn wide(self) -> f64;
    fn narrowed(value: f64) -> Self;
}

macro_rules! number {
    ($type:ty, $dtype:expr, $wide:expr, $narrow:expr) => {
        impl Number for $type {
            const DTYPE: DType = $dtype;
            fn wide(self) -> f64 {
                $wide(self)
            }
            fn narrowed(value: f64) -> Self {
                $narrow(value)
            }
        }
    };
}

number!(f16, DType::F16, f16::to_f64, |x| f16::from_f32(x as f32));
number!(bf16, DType::Bf16, bf16::to_f64, |x| bf16::from_f32(x as f32));
number!(f32, DType::F32, f64::from, |x| x as f32);
number!(f64, DType::F64, |x| x, |x| x);

/// A chunk over a slice.
pub fn chunk<T: Number>(tensor: u32, values: &[T]) -> Chunk {
    Chunk {
        tensor,
        dtype: T::DTYPE,
        address: values.as_ptr() as u64,
        rows: 1,
        row_length: values.len() as u64,
        row_stride: 0,
        weight: 1,
    }
}

/// Chunks of at most `length` elements over a slice.
pub fn chunks<T: Number>(values: &[T], length: usize) -> Vec<Chunk> {
    values.chunks(length.max(1)).map(|part| chunk(0, part)).collect()
}

/// Every instruction set of this machine.
pub fn instruction_sets() -> Vec<Simd> {
    let mut sets = vec![Simd::Baseline];
    #[cfg(target_arch = "x86_64")]
    match detect() {
        Simd::Avx512 => sets.extend([Simd::Avx2, Simd::Avx512]),
        Simd::Avx2 => sets.push(Simd::Avx2),
        Simd::Baseline => {}
    }
    sets
}

/// The sums of chunks.
pub fn sums(chunks: &[Chunk], pass: Pass, threads: usize) -> Sums {
    // SAFETY: the tests' chunks lie over slices that they hold.
    unsafe { sum(chunks, pass, Threads::new(threads)) }
}

/// The total norm of chunks, with a second pass where powers need one.
pub fn norm(chunks: &[Chunk], kind: NormKind, simd: Simd, threads: usize) -> f64 {
    let first = sums(chunks, Pass { kind, scale: None, simd }, threads);
    total(&first, kind, None).unwrap_or_else(|| {
        let extremes = sums(chunks, Pass { kind: kind.leading(), scale: None, simd }, threads);
        let scale = Some(scale_from(&extremes, kind));
        total(&sums(chunks, Pass { kind, scale, simd }, threads), kind, scale).expect("a scaled pass is final")
    })
}

/// x / 2^UNIT of a finite magnitude, or its square.
pub fn exact_power(x: f64, power: u32) -> BigUint {
    let bits = x.abs().to_bits();
    let biased = (bits >> 52) as i64;
    let fraction = bits & ((1 << 52) - 1);
    let whole = if biased == 0 { fraction } else { fraction | 1 << 52 };
    let exponent = (biased.max(1) - 1075) * i64::from(power);
    BigUint::from(whole).pow(power) << (exponent - UNIT)
}

/// The float64 nearest to `units` x 2^`UNIT`, ties to even.
pub fn rounded(units: &BigUint) -> f64 {
    compose(units.clone(), true, UNIT)
}

/// The float64 nearest to the square root of `units` x 2^`UNIT`.
pub fn rounded_root(units: &BigUint) -> f64 {
    // 200 extra bits: enough for the half bit and a sticky remainder below it
    let extended = units << 200u32;
    let root = extended.sqrt();
    let exact = &root * &root == extended;
    compose(root, exact, UNIT / 2 - 100)
}

/// `whole` x 2^`unit` rounded to float64; not `exact` means that a little more was cut off below.
fn compose(whole: BigUint, exact: bool, unit: i64) -> f64 {
    if whole.is_zero() {
        return 0.0;
    }
    let drop = (whole.bits() as i64 - 53).max(-1074 - unit);
    if drop <= 0 {
        return whole.iter_u64_digits().next().unwrap_or(0) as f64 * 2f64.powi(unit as i32);
    }
    let mut kept = &whole >> drop as u64;
    let rest = &whole - (&kept << drop as u64);
    let half = BigUint::one() << (drop - 1) as u64;
    if rest > half || (rest == half && (!exact || kept.bit(0))) {
        kept += 1u32;
    }
    let kept = kept.iter_u64_digits().next().unwrap_or(0) as f64;
    let scale = (unit + drop) as i32;
    kept * 2f64.powi(scale / 2) * 2f64.powi(scale - scale / 2)
}
