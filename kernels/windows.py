"""Where the grids of a chunk lie, and the check that every element fits them.

A window is chosen from a sample of the chunk: room above the largest element seen for what is still
to come, and everything down to the lowest grid exact. The smallest magnitude that is still a
multiple of the lowest grid is a threshold; a carry out of an integer addition tells elements below.
"""

import triton
import triton.language as tl

from .words import bias, fraction_bits, magnitudes


@triton.jit
def first_grid(
    exponent, P: tl.constexpr, DTYPE: tl.constexpr, GROWTH: tl.constexpr, SLACK: tl.constexpr
):
    """Grid of the first level for elements around 2**exponent, 2**GROWTH of them a lane.

    float16 has so few exponents that one window holds them all.
    """
    if DTYPE == tl.float16:
        return P * 16 + GROWTH + 1 - 52 + exponent * 0
    else:
        return P * (exponent + 1 + SLACK) + GROWTH + 1 - 52


@triton.jit
def smallest_exponent(bottom, P: tl.constexpr, DTYPE: tl.constexpr):
    """The least e such that terms of all elements from 2**e up are multiples of 2**bottom."""
    FRACTION: tl.constexpr = fraction_bits(DTYPE)
    if P == 3 and DTYPE == tl.float32:
        return (bottom + 52 + 2 + 300 * 3) // 3 - 300  # cubes are rounded to 53 bits
    exponent = (bottom + P - 1 + 2400 * P) // P - 2400 + FRACTION
    if P == 3 and DTYPE == tl.bfloat16:
        return tl.maximum(exponent, -42)  # cubes stay exact in float32
    else:
        return exponent


@triton.jit
def threshold_bits(exponent, DTYPE: tl.constexpr):
    """Bits of 2**exponent, held between the smallest normal number and infinity.

    Subnormals have fewer bits than their exponent says: they always count as too small.
    """
    BIAS: tl.constexpr = bias(DTYPE)
    TOP: tl.constexpr = 2 * BIAS + 1
    biased = tl.minimum(tl.maximum(exponent + BIAS, 1), TOP)
    if DTYPE == tl.float64:
        return biased.to(tl.int64) << 52
    else:
        return biased << fraction_bits(DTYPE)


@triton.jit
def carry_limit(threshold, DTYPE: tl.constexpr):
    """What `note_small` adds to magnitudes: 2**(bits - 1) - threshold, in each half of a word."""
    if DTYPE == tl.float64:
        return 0x7FFFFFFFFFFFFFFF - threshold + 1
    elif DTYPE == tl.float32:
        return (0x80000000 - threshold.to(tl.int64)).to(tl.int32)
    else:
        return (0x8000 - threshold) * 0x10001


@triton.jit
def note_small(flags, word, limit, DTYPE: tl.constexpr):
    """Sets the top bit of a half of `flags` where 0 < |x| < threshold, by carries alone.

    Adding 2**(bits-1) - threshold carries into the top bit iff |x| >= threshold; adding
    2**(bits-1) - 1 carries iff |x| > 0; no carry crosses to the other half. Minimum and maximum
    instructions would cost a multiple of these full-rate ones.
    """
    magnitude = magnitudes(word, DTYPE)
    if DTYPE == tl.float64:
        small = (magnitude + 0x7FFFFFFFFFFFFFFF) & ~(magnitude + limit)
        return flags | (small >> 32).to(tl.int32)
    elif DTYPE == tl.float32:
        return flags | ((magnitude + 0x7FFFFFFF) & ~(magnitude + limit))
    else:
        return flags | ((magnitude + 0x7FFF7FFF) & ~(magnitude + limit))


@triton.jit
def split_small(word, limit, DTYPE: tl.constexpr):
    """A word of two elements -> (word of the large ones, word of the small ones), 0 for others."""
    tl.static_assert(DTYPE == tl.bfloat16)
    flags = note_small(word * 0, word, limit, DTYPE)
    small = ((flags >> 15) & 0x10001) * 0xFFFF
    return word & ~small, word & small


@triton.jit
def is_flagged(flags, DTYPE: tl.constexpr):
    """Lanes in which `note_small` found something."""
    if DTYPE == tl.float64 or DTYPE == tl.float32:
        return flags < 0
    else:
        return (flags & -2147450880) != 0  # 0x80008000


@triton.jit
def exponent_of(bits, DTYPE: tl.constexpr):
    """floor(log2 |x|) of a finite positive scalar from its magnitude bits, as int32."""
    if DTYPE == tl.float64:
        x = bits.to(tl.float64, bitcast=True)
        lifted = tl.where(bits < (1 << 52), x * 18014398509481984.0, x)  # 2**54
        field = (lifted.to(tl.int64, bitcast=True) >> 52).to(tl.int32)
        return field - 1023 - tl.where(bits < (1 << 52), 54, 0)
    elif DTYPE == tl.float32:
        return _exponent_of_single(bits.to(tl.float32, bitcast=True))
    elif DTYPE == tl.bfloat16:
        return _exponent_of_single((bits << 16).to(tl.float32, bitcast=True))
    else:
        return _exponent_of_single(bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32))


@triton.jit
def _exponent_of_single(x):
    wide = x.to(tl.float64)  # normal there, whatever it was here
    return (wide.to(tl.int64, bitcast=True) >> 52).to(tl.int32) - 1023
