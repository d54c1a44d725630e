//! The one rounding that a norm gets: from the exact sum to float64, ties to even.

use super::double_double::DoubleDouble;
use super::limbs::{BASE, LIMBS, Limbs};

/// The exponent of float64's smallest positive number.
const SMALLEST: i32 = -1074;

/// Bits after the leading one in a float64.
const FRACTION_BITS: i32 = 52;

/// A carried sum as a row of bits, bit 0 weighing 2^BASE.
struct Bits([i64; LIMBS]);

impl Bits {
    /// Position of the leading one; `None` for zero.
    fn top(&self) -> Option<i32> {
        let limb = self.0.iter().rposition(|&limb| limb != 0)?;
        Some(32 * limb as i32 + 63 - self.0[limb].leading_zeros() as i32)
    }

    /// The bits from `position` (at least 0) up; all of the sum above must fit in 128 bits.
    fn above(&self, position: i32) -> u128 {
        let (limb, shift) = ((position / 32) as usize, position % 32);
        let mut bits = 0;
        for (index, &digit) in self.0.iter().enumerate().skip(limb) {
            let place = 32 * (index - limb) as i32 - shift;
            let digit = digit as u128;
            bits |= match place {
                ..0 => digit >> -place,
                0..128 => digit << place,
                _ => 0,
            };
        }
        bits
    }

    /// Whether any bit below `position` is set.
    fn any_below(&self, position: i32) -> bool {
        let (limb, shift) = ((position / 32) as usize, position % 32);
        self.0[..limb].iter().any(|&digit| digit != 0) || self.0[limb] & ((1 << shift) - 1) != 0
    }
}

/// 2^`exponent`, for the exponents of normal numbers; the nearest of them otherwise.
pub const fn power_of_two(exponent: i32) -> f64 {
    let biased = if exponent < -1022 {
        1
    } else if exponent > 1023 {
        2046
    } else {
        exponent + 1023
    };
    f64::from_bits((biased as u64) << FRACTION_BITS)
}

/// `value` x 2^`exponent`, rounded once at most; infinite past the largest float64.
#[inline]
pub fn times_power_of_two(value: f64, exponent: i32) -> f64 {
    // Two steps, as a single factor may itself be out of range; the first one is exact.
    let half = exponent / 2;
    value * power_of_two(half) * power_of_two(exponent - half)
}

/// `value` in float32, rounded to odd: what is cut off leaves its mark in the last bit.
///
/// A second rounding, to a type at least two bits narrower, then gives what one rounding of `value` would. Source: S.
/// Boldo and G. Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", IEEE
/// Transactions on Computers 57 (2008).
#[inline(always)]
pub fn to_odd_float32(value: f64) -> f32 {
    let near = value as f32;
    let back = f64::from(near);
    let bits = near.to_bits();
    let is_right = back == value || value.is_nan() || bits & 1 == 1;
    let other = if back.abs() > value.abs() { bits.wrapping_sub(1) } else { bits.wrapping_add(1) };
    if is_right { near } else { f32::from_bits(other) }
}

/// The sum rounded to float64.
pub fn value(limbs: &Limbs) -> f64 {
    let bits = Bits(limbs.carried());
    let Some(top) = bits.top() else { return 0.0 };
    let unit = (top + BASE - FRACTION_BITS).max(SMALLEST);
    let half_place = unit - BASE - 1;
    let doubled = bits.above(half_place) as u64;
    times_power_of_two(round_half(doubled, !bits.any_below(half_place)), unit)
}

/// The square root of the sum rounded to float64.
///
/// An integer root of the leading bits carries one bit more than the result; whether anything is left below
/// settles ties, so the answer is right also where the sum itself is no float64.
pub fn square_root(limbs: &Limbs) -> f64 {
    let bits = Bits(limbs.carried());
    let Some(top) = bits.top() else { return 0.0 };
    let unit = ((top + BASE).div_euclid(2) - FRACTION_BITS).max(SMALLEST);
    let place = 2 * (unit - 1) - BASE;
    let square = bits.above(place);
    let doubled = square.isqrt();
    let exact = doubled * doubled == square && !bits.any_below(place);
    times_power_of_two(round_half(doubled as u64, exact), unit)
}

/// `doubled` / 2 rounded to an integer, ties to even; not `exact` means that a little more was cut off.
fn round_half(doubled: u64, exact: bool) -> f64 {
    let whole = doubled >> 1;
    let up = doubled & 1 == 1 && (!exact || whole & 1 == 1);
    (whole + u64::from(up)) as f64
}

/// The sum to the power 1 / `degree`, times 2^`exponent`, rounded to float64 from 100 bits.
pub fn root(limbs: &Limbs, degree: f64, exponent: i32) -> f64 {
    let bits = Bits(limbs.carried());
    let Some(top) = bits.top() else {
        return if degree < 0.0 { f64::INFINITY } else { 0.0 };
    };
    let (mantissa, shift) = leading(&bits, top).root(top + BASE, degree);
    times_power_of_two(mantissa.hi + mantissa.lo, shift.saturating_add(exponent))
}

/// The leading 106 bits as a number in [1, 2).
fn leading(bits: &Bits, top: i32) -> DoubleDouble {
    let place = (top - 105).max(0);
    let leading = bits.above(place) << (105 - (top - place));
    let (high, low) = ((leading >> 53) as u64, (leading as u64) & ((1 << 53) - 1));
    DoubleDouble::fast_sum(high as f64 * power_of_two(-52), low as f64 * power_of_two(-105))
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use num_bigint::BigInt;
    use num_traits::Signed;
    use proptest::prelude::*;

    use super::*;

    /// `value` / 2^-1074.
    fn units(value: f64) -> BigInt {
        let bits = value.abs().to_bits();
        let (biased, fraction) = (bits >> 52, bits & ((1 << 52) - 1));
        let whole = if biased == 0 { fraction } else { fraction | 1 << 52 };
        let magnitude = BigInt::from(whole) << (biased.max(1) - 1);
        if value < 0.0 { -magnitude } else { magnitude }
    }

    /// Whether `found` is the number of a type nearest to `value`, ties to even; `widen` gives the type's numbers.
    fn is_nearest(value: f64, found: u16, infinity: u16, widen: impl Fn(u16) -> f64) -> bool {
        let sign = found & 0x8000;
        let wide = |magnitude: u16| match magnitude {
            // What infinity stands for in a rounding: the power of two after the largest number.
            _ if magnitude == infinity => 2.0 * widen(infinity - 1) - widen(infinity - 2),
            _ => widen(magnitude),
        };
        let magnitude = found & 0x7FFF;
        let distance = |magnitude: u16| (units(wide(magnitude)) - units(value.abs())).abs();
        let is_as_near = |other: u16| match distance(magnitude).cmp(&distance(other)) {
            std::cmp::Ordering::Less => true,
            std::cmp::Ordering::Equal => magnitude & 1 == 0,
            std::cmp::Ordering::Greater => false,
        };
        sign == ((value.to_bits() >> 48) as u16 & 0x8000)
            && (magnitude == 0 || is_as_near(magnitude - 1))
            && (magnitude == infinity || is_as_near(magnitude + 1))
    }

    fn near_bf16(value: f64) -> bool {
        is_nearest(value, bf16::from_f32(to_odd_float32(value)).to_bits(), 0x7F80, |bits| {
            bf16::from_bits(bits).to_f64()
        })
    }

    fn near_f16(value: f64) -> bool {
        is_nearest(value, f16::from_f32(to_odd_float32(value)).to_bits(), 0x7C00, |bits| f16::from_bits(bits).to_f64())
    }

    #[test]
    fn a_tie_of_float32_is_decided_by_what_float64_has() {
        let value = 1.0 + 2f64.powi(-8) + 2f64.powi(-30);
        assert_eq!(bf16::from_f32(to_odd_float32(value)).to_f64(), 1.0078125);
        assert_eq!(bf16::from_f32(value as f32).to_f64(), 1.0, "two roundings");
    }

    #[test]
    fn what_float32_has_stays() {
        for value in [0.0, -0.0, 1.5, -3.0e38, 1e-45, f64::INFINITY, f64::NEG_INFINITY, f64::from(f32::MAX)] {
            assert_eq!(f64::from(to_odd_float32(f64::from(value as f32))).to_bits(), f64::from(value as f32).to_bits());
        }
        assert!(to_odd_float32(f64::NAN).is_nan());
        assert_eq!(to_odd_float32(1e300), f32::MAX);
        assert_eq!(to_odd_float32(-1e-300), f32::from_bits(0x8000_0001));
    }

    proptest! {
        #[test]
        fn any_number_is_rounded_once(bits in any::<u64>()) {
            let value = f64::from_bits(bits);
            prop_assume!(value.is_finite());
            prop_assert!(near_bf16(value) && near_f16(value), "{value:e}");
        }

        #[test]
        fn ties_and_their_neighbours_are_rounded_once(bits in any::<u16>(), away in -3i64..=3, far in -35..0i32) {
            for wide in [bf16::from_bits(bits).to_f64(), f16::from_bits(bits).to_f64()] {
                let tie = (wide * (1.0 + 2f64.powi(-8))).to_bits().wrapping_add_signed(away);
                for value in [f64::from_bits(tie), wide * (1.0 + 2f64.powi(-11) + 2f64.powi(far)), wide + 2f64.powi(-25)] {
                    prop_assert!(!value.is_finite() || (near_bf16(value) && near_f16(value)), "{value:e}");
                }
            }
        }
    }
}
