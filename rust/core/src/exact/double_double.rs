//! Numbers of 106 bits as unevaluated sums of two float64.
//!
//! Only additions, multiplications and fused multiply-adds in a fixed order, so that a GPU kernel that
//! follows the same order gets the same bits. Source: T. J. Dekker, "A floating-point technique for extending the
//! available precision", Numerische Mathematik 18 (1971); M. Joldes et al., "Tight and rigorous error bounds for
//! basic building blocks of double-word arithmetic", TOMS 44 (2017).

use std::f64::consts::{LN_2, LOG2_E};

use super::round::power_of_two;

/// ln 2 = LN_2 + LN_2_REST.
const LN_2_REST: f64 = 2.319_046_813_846_299_6e-17;

/// Halvings of the argument of `exp` before its series.
const EXP_HALVINGS: i32 = 9;

/// Terms of the series of `exp` after the halvings: (ln 2 / 2^10)^10 / 10! is below 2^-120.
const EXP_TERMS: i32 = 9;

/// hi + lo, with |lo| at most half an ulp of hi.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DoubleDouble {
    /// The sum rounded to float64.
    pub hi: f64,
    /// What the rounding left.
    pub lo: f64,
}

impl DoubleDouble {
    /// The number `value`.
    pub const fn new(value: f64) -> Self {
        DoubleDouble { hi: value, lo: 0.0 }
    }

    /// a + b, where |a| >= |b| or a = 0.
    #[inline(always)]
    pub fn fast_sum(a: f64, b: f64) -> Self {
        let hi = a + b;
        DoubleDouble { hi, lo: b - (hi - a) }
    }

    #[inline]
    fn sum(a: f64, b: f64) -> Self {
        let hi = a + b;
        let other = hi - a;
        DoubleDouble { hi, lo: (a - (hi - other)) + (b - other) }
    }

    /// self + other.
    #[inline]
    pub fn plus(self, other: Self) -> Self {
        let high = Self::sum(self.hi, other.hi);
        let low = Self::sum(self.lo, other.lo);
        let middle = Self::fast_sum(high.hi, high.lo + low.hi);
        Self::fast_sum(middle.hi, middle.lo + low.lo)
    }

    /// self x other.
    #[inline(always)]
    pub fn multiply(self, other: Self) -> Self {
        let product = self.hi * other.hi;
        let rest = self.hi.mul_add(other.hi, -product);
        let cross = self.hi * other.lo + self.lo * other.hi;
        Self::fast_sum(product, rest + cross)
    }

    /// self / divisor.
    pub fn divide(self, divisor: f64) -> Self {
        let first = self.hi / divisor;
        let remainder = (-first).mul_add(divisor, self.hi) + self.lo;
        Self::fast_sum(first, remainder / divisor)
    }

    /// e^self as (mantissa, exponent of two), for |self| below 2^20.
    fn exp(self) -> (Self, i32) {
        let exponent = (self.hi * LOG2_E).round();
        let ln_2 = DoubleDouble { hi: LN_2, lo: LN_2_REST };
        let reduced = self.plus(ln_2.multiply(DoubleDouble::new(-exponent)));
        let halved = 1.0 / f64::from(1 << EXP_HALVINGS);
        let x = DoubleDouble { hi: reduced.hi * halved, lo: reduced.lo * halved };
        let mut less_one = x.divide(f64::from(EXP_TERMS));
        for term in (1..EXP_TERMS).rev() {
            less_one = less_one.plus(DoubleDouble::new(1.0)).multiply(x).divide(f64::from(term));
        }
        for _ in 0..EXP_HALVINGS {
            let doubled = DoubleDouble { hi: 2.0 * less_one.hi, lo: 2.0 * less_one.lo };
            less_one = doubled.plus(less_one.multiply(less_one));
        }
        (less_one.plus(DoubleDouble::new(1.0)), exponent as i32)
    }

    /// ln self for self in [1, 2): one Newton step on the float64 logarithm.
    fn ln(self) -> Self {
        let guess = self.hi.ln();
        let (mantissa, exponent) = DoubleDouble::new(-guess).exp();
        let scale = power_of_two(exponent);
        let inverse = DoubleDouble { hi: mantissa.hi * scale, lo: mantissa.lo * scale };
        let correction = self.multiply(inverse).plus(DoubleDouble::new(-1.0));
        DoubleDouble::new(guess).plus(correction)
    }

    /// (self x 2^`exponent`)^(1 / `degree`) as (mantissa, exponent of two), for self in [1, 2).
    pub fn root(self, exponent: i32, degree: f64) -> (Self, i32) {
        let ln_2 = DoubleDouble { hi: LN_2, lo: LN_2_REST };
        let ln = self.ln().plus(ln_2.multiply(DoubleDouble::new(f64::from(exponent))));
        ln.divide(degree).exp()
    }
}
