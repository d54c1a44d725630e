"""Deposits into the limbs: a sum in units of a power of two becomes a few integer atomics.

Limb j weighs 2**(32 * j + BASE). Integer addition has no order, so any grid, chunk size and split
over devices gives the same limbs. Programs deposit into one of STRIPES copies, so that they do not
queue for the same addresses; the finish adds the copies up.
Source: U. Kulisch, "Computer Arithmetic and Validity" (2008).
"""

import triton
import triton.language as tl

BASE = tl.constexpr(-2176)
LIMBS = tl.constexpr(136)
NAN = tl.constexpr(136)
POSITIVE_INFINITY = tl.constexpr(137)
NEGATIVE_INFINITY = tl.constexpr(138)
ZEROS = tl.constexpr(139)
MISFITS = tl.constexpr(140)
EXTREME = tl.constexpr(141)
SUMS_LENGTH = tl.constexpr(144)
STRIPES = tl.constexpr(16)

MASK = tl.constexpr(0xFFFFFFFF)


@triton.jit
def power_of_two(exponent):
    """2**exponent in float64, for the exponents of normal numbers."""
    return ((exponent + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _add(limbs, wholes, places):
    """Adds wholes * 2**(places + BASE), |whole| < 2**62, as three pieces below 2**33 each."""
    limb = limbs + places // 32
    shift = (places % 32).to(tl.int64)
    low = (wholes & MASK) << shift
    high = (wholes >> 32) << shift
    is_some = wholes != 0
    tl.atomic_add(limb, low & MASK, mask=is_some, sem="relaxed")
    tl.atomic_add(limb + 1, (low >> 32) + (high & MASK), mask=is_some, sem="relaxed")
    tl.atomic_add(limb + 2, high >> 32, mask=is_some, sem="relaxed")


@triton.jit
def deposit(limbs, wholes, grids, weight):
    """Adds weight * wholes * 2**grids (tiles of int64 and int32), exactly.

    The weight goes in by 16-bit digits. A grid below limb 0 only comes with a whole that is a
    multiple of what lies below.
    """
    below = tl.maximum(BASE - grids, 0)
    wholes = wholes >> tl.minimum(below, 63).to(tl.int64)
    places = grids + below - BASE
    if weight == 1:
        _add(limbs, wholes, places)
    else:
        digit = 0
        while weight != 0:
            times = weight & 0xFFFF
            _add(limbs, (wholes & MASK) * times, places + digit)
            _add(limbs, (wholes >> 32) * times, places + digit + 32)
            weight = (weight >> 16) & 0xFFFFFFFFFFFF
            digit += 16


@triton.jit
def count(place, number, weight):
    """Adds weight * number to a count, if there is anything to count."""
    if number != 0:
        tl.atomic_add(place, number.to(tl.int64) * weight, sem="relaxed")
