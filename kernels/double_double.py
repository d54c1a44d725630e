"""Numbers of 106 bits as unevaluated sums of two float64, in the same steps as the CPU engine.

Only additions, multiplications and fused multiply-adds in a fixed order, so the bits are those of
the core's `exact/double_double.rs`. The kernels are compiled without contraction of a * b + c.
Source: T. J. Dekker, "A floating-point technique for extending the available precision",
Numerische Mathematik 18 (1971); M. Joldes et al., TOMS 44 (2017).
"""

import triton
import triton.language as tl

from .limbs import power_of_two

LN_2 = tl.constexpr(0.6931471805599453)
LN_2_REST = tl.constexpr(2.3190468138462996e-17)
LOG2_E = tl.constexpr(1.4426950408889634)
EXP_HALVINGS = tl.constexpr(9)
EXP_HALVED = tl.constexpr(2.0**-9)
EXP_TERMS = tl.constexpr(9)


@triton.jit
def fast_sum(a, b):
    """a + b, where |a| >= |b| or a = 0."""
    high = a + b
    return high, b - (high - a)


@triton.jit
def _sum(a, b):
    high = a + b
    other = high - a
    return high, (a - (high - other)) + (b - other)


@triton.jit
def plus(a_high, a_low, b_high, b_low):
    """a + b."""
    high, rest = _sum(a_high, b_high)
    low, low_rest = _sum(a_low, b_low)
    middle, middle_rest = fast_sum(high, rest + low)
    return fast_sum(middle, middle_rest + low_rest)


@triton.jit
def times(a_high, a_low, b_high, b_low):
    """a * b."""
    product = a_high * b_high
    rest = tl.fma(a_high, b_high, -product)
    cross = a_high * b_low + a_low * b_high
    return fast_sum(product, rest + cross)


@triton.jit
def over(a_high, a_low, divisor):
    """a / divisor."""
    first = a_high / divisor
    remainder = tl.fma(-first, divisor, a_high) + a_low
    return fast_sum(first, remainder / divisor)


@triton.jit
def exp(high, low):
    """e**a as mantissa and exponent of two, for |a| below 2**20."""
    exponent = tl.floor(high * LOG2_E + 0.5)
    far_high, far_low = times(LN_2 + 0.0 * high, LN_2_REST + 0.0 * high, -exponent, 0.0 * high)
    high, low = plus(high, low, far_high, far_low)
    high = high * EXP_HALVED
    low = low * EXP_HALVED
    less_one_high, less_one_low = over(high, low, EXP_TERMS + 0.0 * high)
    for step in range(1, EXP_TERMS):
        less_one_high, less_one_low = plus(
            less_one_high, less_one_low, 1.0 + 0.0 * high, 0.0 * high
        )
        less_one_high, less_one_low = times(less_one_high, less_one_low, high, low)
        divisor = (EXP_TERMS - step) + 0.0 * high
        less_one_high, less_one_low = over(less_one_high, less_one_low, divisor)
    for _ in range(EXP_HALVINGS):
        square_high, square_low = times(less_one_high, less_one_low, less_one_high, less_one_low)
        less_one_high, less_one_low = plus(
            2.0 * less_one_high, 2.0 * less_one_low, square_high, square_low
        )
    high, low = plus(less_one_high, less_one_low, 1.0 + 0.0 * high, 0.0 * high)
    return high, low, exponent.to(tl.int32)


@triton.jit
def log(high, low):
    """ln a for a in [1, 2): one Newton step on the float64 logarithm."""
    guess = tl.log(high)
    inverse_high, inverse_low, exponent = exp(-guess, 0.0 * guess)
    scale = power_of_two(exponent)
    near_high, near_low = times(high, low, inverse_high * scale, inverse_low * scale)
    near_high, near_low = plus(near_high, near_low, -1.0 + 0.0 * high, 0.0 * high)
    return plus(guess, 0.0 * guess, near_high, near_low)


@triton.jit
def leading_root(high, low, exponent, degree):
    """(a * 2**exponent)**(1 / degree) as mantissa and exponent of two, for a in [1, 2)."""
    far = exponent.to(tl.float64)
    far_high, far_low = times(LN_2 + 0.0 * high, LN_2_REST + 0.0 * high, far, 0.0 * high)
    log_high, log_low = log(high, low)
    high, low = plus(log_high, log_low, far_high, far_low)
    high, low = over(high, low, degree)
    return exp(high, low)
