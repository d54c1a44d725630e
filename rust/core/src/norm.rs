//! Norm kinds: what one element adds to the sum, for each norm type p.

use thiserror::Error;

use crate::exact::times_power_of_two;

/// Terms inside these bounds are exact to float64's last bit, their double-double rests included.
pub const SMALLEST_TERM: f64 = f64::from_bits((1023 - 960) << 52);
/// See [`SMALLEST_TERM`].
pub const LARGEST_TERM: f64 = f64::from_bits((1023 + 1000) << 52);

/// Above this |p| a power of two as scale could let a term overflow: the magnitude itself is divided out.
const LARGEST_SCALED_POWER: f64 = 900.0;

/// Below this |p| two non-zero elements decide the norm: it is at least 2^(1/p) times the smallest of them for p > 0,
/// at most 2^(1/p) times the largest one for p < 0, and 2^4096 outweighs float64's whole range.
const SMALLEST_POWER: f64 = 1.0 / 4096.0;

/// The norm type p, sorted by how its sum is formed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NormKind {
    /// p = 0: the number of non-zero elements.
    Count,
    /// p = 1: the sum of magnitudes.
    Sum,
    /// p = 2: the sum of squares.
    Squares,
    /// p = inf: the largest magnitude.
    Max,
    /// p = -inf: the smallest magnitude.
    Min,
    /// Integer p of 3 and more.
    Power(u32),
    /// Any other p.
    Real(f64),
    /// |p| below [`SMALLEST_POWER`], but not 0.
    Tiny(f64),
}

/// A norm type that is no norm type.
#[derive(Clone, Copy, Debug, Error, PartialEq)]
pub enum NormError {
    /// p is NaN.
    #[error("`norm_type` is nan; pass a number such as 2.0, 1.0, 0.0 or inf")]
    NotANumber,
}

impl NormKind {
    /// The kind of norm type `p`.
    pub fn new(p: f64) -> Result<Self, NormError> {
        Ok(match p {
            _ if p.is_nan() => return Err(NormError::NotANumber),
            0.0 => NormKind::Count,
            1.0 => NormKind::Sum,
            2.0 => NormKind::Squares,
            f64::INFINITY => NormKind::Max,
            f64::NEG_INFINITY => NormKind::Min,
            _ if p > 0.0 && p.fract() == 0.0 && p <= f64::from(u32::MAX) => NormKind::Power(p as u32),
            _ if p.abs() < SMALLEST_POWER => NormKind::Tiny(p),
            _ => NormKind::Real(p),
        })
    }

    /// The norm type p.
    pub fn p(self) -> f64 {
        match self {
            NormKind::Count => 0.0,
            NormKind::Sum => 1.0,
            NormKind::Squares => 2.0,
            NormKind::Max => f64::INFINITY,
            NormKind::Min => f64::NEG_INFINITY,
            NormKind::Power(p) => f64::from(p),
            NormKind::Real(p) | NormKind::Tiny(p) => p,
        }
    }

    /// The kind whose extreme magnitude leads the sum of powers: the largest for p > 0, the smallest for p < 0.
    pub fn leading(self) -> NormKind {
        if self.p() < 0.0 { NormKind::Min } else { NormKind::Max }
    }

    /// The scale that brings the terms of a list into range, from the magnitude that leads it: the largest one for
    /// p > 0, the smallest non-zero one for p < 0.
    pub fn scale_for(self, leading: f64) -> Scale {
        if self.p().abs() > LARGEST_SCALED_POWER {
            Scale::Divisor(leading)
        } else {
            Scale::Exponent(exponent_of(leading))
        }
    }
}

/// floor(log2 x) for finite x > 0; that of the smallest float64 for 0. By integers, whatever mode the thread is in.
pub fn exponent_of(x: f64) -> i32 {
    const FRACTION_BITS: i32 = f64::MANTISSA_DIGITS as i32 - 1;
    let bits = x.to_bits();
    let fraction = bits & ((1 << FRACTION_BITS) - 1);
    match (bits >> FRACTION_BITS & 0x7FF) as i32 {
        0 => (fraction.max(1).ilog2() as i32) - FRACTION_BITS - 1022,
        biased => biased - 1023,
    }
}

/// What magnitudes are divided by before they are raised to p.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scale {
    /// 2^exponent.
    Exponent(i32),
    /// The leading magnitude itself, for very large |p|.
    Divisor(f64),
}

impl Scale {
    /// magnitude / scale.
    #[inline]
    pub fn divide(self, magnitude: f64) -> f64 {
        match self {
            Scale::Exponent(exponent) => times_power_of_two(magnitude, -exponent),
            Scale::Divisor(divisor) => magnitude / divisor,
        }
    }
}
