//! |z| of complex elements in float64.

use super::element::Element;
use crate::exact::{DoubleDouble, times_power_of_two};
use crate::norm::exponent_of;

/// |real + i imaginary|: the square root of the double-double sum of squares, scaled so that nothing leaves
/// float64's range; NaN if a part is NaN, else infinite if a part is.
pub fn complex_magnitude<T: Element>(real: T, imaginary: T) -> f64 {
    let (real, imaginary) = (real.widen().abs(), imaginary.widen().abs());
    let larger = real.max(imaginary);
    if real.is_nan() || imaginary.is_nan() {
        return f64::NAN;
    }
    if larger == 0.0 || larger.is_infinite() {
        return larger;
    }
    let exponent = exponent_of(larger);
    let square = |part: f64| {
        let part = DoubleDouble::new(times_power_of_two(part, -exponent));
        part.multiply(part)
    };
    let sum = square(real).plus(square(imaginary));
    let root = sum.hi.sqrt();
    let rest = (-root).mul_add(root, sum.hi) + sum.lo;
    times_power_of_two(root + rest / (2.0 * root), exponent)
}
