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
