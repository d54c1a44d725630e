"""|z| of complex elements in float64, in the same steps as the CPU engine."""

import triton
import triton.language as tl

from .double_double import plus, times
from .roots import times_power_of_two


@triton.jit
def _exponents(x):
    """floor(log2 x) of positive float64."""
    is_tiny = x < 2.2250738585072014e-308
    lifted = tl.where(is_tiny, x * 18446744073709551616.0, x)  # 2**64
    field = (lifted.to(tl.int64, bitcast=True) >> 52).to(tl.int32)
    return field - 1023 - tl.where(is_tiny, 64, 0)


@triton.jit
def modulus(real, imaginary):
    """|real + i * imaginary|: NaN if a part is NaN, else infinite if a part is.

    The root of the double-double sum of squares, scaled so that nothing leaves float64's range.
    """
    real = tl.abs(real)
    imaginary = tl.abs(imaginary)
    is_nan = (real != real) | (imaginary != imaginary)
    larger = tl.where(real > imaginary, real, imaginary)
    is_plain = (larger > 0) & (larger < float("inf")) & (is_nan == 0)
    exponent = _exponents(tl.where(is_plain, larger, 1.0))
    a = times_power_of_two(tl.where(is_plain, real, 1.0), -exponent)
    b = times_power_of_two(tl.where(is_plain, imaginary, 0.0), -exponent)
    zero = a * 0.0
    a_high, a_low = times(a, zero, a, zero)
    b_high, b_low = times(b, zero, b, zero)
    high, low = plus(a_high, a_low, b_high, b_low)
    root = tl.sqrt(high)
    rest = tl.fma(-root, root, high) + low
    result = times_power_of_two(root + rest / (2.0 * root), exponent)
    return tl.where(is_nan, float("nan"), tl.where(is_plain, result, larger))
