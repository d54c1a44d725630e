"""Carried limbs in memory -> their value or root, rounded once to float64.

The same steps as the core's `exact/round.rs`: a candidate in float64, corrected by the exact
remainder in integers.
"""

import triton
import triton.language as tl

from .double_double import fast_sum, leading_root
from .limbs import BASE, LIMBS, power_of_two

SMALLEST = tl.constexpr(-1074)


@triton.jit
def times_power_of_two(value, exponent):
    """value * 2**exponent, rounded once at most."""
    half = exponent // 2
    return value * power_of_two(half) * power_of_two(exponent - half)


@triton.jit
def _digit(sums, limb):
    return tl.load(sums + limb, mask=limb < LIMBS, other=0, volatile=True)


@triton.jit
def top_bit(sums, limbs):
    """Position of the leading one, bit 0 weighing 2**BASE; below zero for an empty sum."""
    lanes = tl.arange(0, limbs.shape[0])
    limb = tl.max(tl.where((lanes < LIMBS) & (limbs != 0), lanes, -1), 0)
    digit = _digit(sums, tl.maximum(limb, 0)).to(tl.float64)
    bit = ((digit.to(tl.int64, bitcast=True) >> 52) & 0x7FF).to(tl.int32) - 1023
    return tl.where(limb < 0, -1, 32 * limb + bit)


@triton.jit
def low_bits(sums, place):
    """The 64 bits of the sum from `place` up, as int64."""
    limb = place // 32
    shift = (place % 32).to(tl.int64)
    low = _digit(sums, limb) >> shift
    middle = _digit(sums, limb + 1) << (32 - shift)
    high = (_digit(sums, limb + 2) << (63 - shift)) << 1
    return low | middle | high


@triton.jit
def is_any_below(sums, limbs, place):
    """Whether any bit below `place` is set."""
    lanes = tl.arange(0, limbs.shape[0])
    limb = place // 32
    part = _digit(sums, limb) & ((1 << (place % 32).to(tl.int64)) - 1)
    return (tl.max(((lanes < limb) & (limbs != 0)).to(tl.int32), 0) != 0) | (part != 0)


@triton.jit
def _approximate(sums, place):
    """The sum from `place` up, as float64; off by a few roundings."""
    limb = place // 32
    value = _digit(sums, limb).to(tl.float64)
    for step in tl.static_range(1, 5):
        value += _digit(sums, limb + step).to(tl.float64) * power_of_two(32 * step + 0 * place)
    return value * power_of_two(-(place % 32))


@triton.jit
def _round_half(doubled, is_exact):
    """doubled / 2 rounded to an integer, ties to even; not exact: a little more was cut off."""
    whole = doubled >> 1
    up = ((doubled & 1) == 1) & ((is_exact == 0) | ((whole & 1) == 1))
    return (whole + up.to(tl.int64)).to(tl.float64)


@triton.jit
def value(sums, limbs):
    """The sum rounded to float64."""
    top = top_bit(sums, limbs)
    unit = tl.maximum(top + BASE - 52, SMALLEST)
    place = unit - BASE - 1
    doubled = low_bits(sums, place)
    rounded = _round_half(doubled, is_any_below(sums, limbs, place) == 0)
    return tl.where(top < 0, 0.0, times_power_of_two(rounded, unit))


@triton.jit
def square_root(sums, limbs):
    """The square root of the sum, rounded to float64."""
    top = top_bit(sums, limbs)
    unit = tl.maximum((top + BASE + 4096) // 2 - 2048 - 52, SMALLEST)
    place = 2 * (unit - 1) - BASE
    doubled = tl.sqrt(_approximate(sums, place)).to(tl.int64)
    rest = low_bits(sums, place) - doubled * doubled  # true modulo 2**64, and small
    for _ in range(8):
        if rest < 0:
            doubled -= 1
            rest += 2 * doubled + 1
    for _ in range(8):
        if rest > 2 * doubled:
            rest -= 2 * doubled + 1
            doubled += 1
    is_exact = (rest == 0) & (is_any_below(sums, limbs, place) == 0)
    return tl.where(top < 0, 0.0, times_power_of_two(_round_half(doubled, is_exact), unit))


@triton.jit
def root(sums, limbs, degree):
    """The sum to the power 1 / degree (> 0), from its leading 106 bits."""
    top = top_bit(sums, limbs)
    place = tl.maximum(top - 105, 0)
    lower = (low_bits(sums, place) & ((1 << 53) - 1)).to(tl.float64) * power_of_two(place - top)
    upper = low_bits(sums, place + 53).to(tl.float64) * power_of_two(place - top + 53)
    high, low = fast_sum(upper, lower)
    high, low, shift = leading_root(high, low, top + BASE, degree)
    return tl.where(top < 0, 0.0, times_power_of_two(high + low, shift))
