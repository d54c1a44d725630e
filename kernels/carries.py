"""Limbs with carries pending -> limbs in [0, 2**32), by one program."""

import triton
import triton.language as tl

from .limbs import EXTREME, LIMBS, MASK, STRIPES, SUMS_LENGTH

LANES = tl.constexpr(256)
"""The next power of two from SUMS_LENGTH."""


@triton.jit
def _from_below(scratch, values):
    """What the lane below holds; 0 in lane 0. Lanes meet in memory."""
    lanes = tl.arange(0, LANES)
    tl.debug_barrier()
    tl.store(scratch + lanes, values)
    tl.debug_barrier()
    return tl.load(scratch + lanes - 1, mask=lanes > 0, other=0, volatile=True)


@triton.jit
def _after(first, second):
    """Composition of two carry maps: digit 2 * c of a map is what carry c - 1 becomes, plus 1."""
    composed = first * 0
    for carry in tl.static_range(3):
        between = (first >> (2 * carry)) & 3
        composed += ((second >> (2 * between)) & 3) << (2 * carry)
    return composed


@triton.jit
def _carry_map(limbs):
    """The carry out of a limb in [-1, 2**32], for a carry in of -1, 0 and 1."""
    carry_map = tl.zeros([LANES], tl.int32)
    for carry in tl.static_range(3):
        out = (limbs + (carry - 1)) >> 32
        carry_map += (out.to(tl.int32) + 1) << (2 * carry)
    return carry_map


@triton.jit
def carry(limbs, scratch):
    """Propagates all carries of int64[LANES]; lanes from LIMBS on must be zero.

    Two moves by one limb leave limbs in [-1, 2**32]; what then runs through many limbs is a
    composition of maps of {-1, 0, 1}, which a scan computes.
    """
    lanes = tl.arange(0, LANES)
    is_lower = lanes < LIMBS - 1
    for _ in tl.static_range(2):
        carries = _from_below(scratch, tl.where(is_lower, limbs >> 32, 0))
        limbs = tl.where(is_lower, limbs & MASK, limbs) + carries
    maps = tl.associative_scan(tl.where(is_lower, _carry_map(limbs), 0x15), 0, _after)
    carries = _from_below(scratch, (((maps >> 2) & 3) - 1).to(tl.int64))
    limbs += tl.where(lanes < LIMBS, carries, 0)
    return tl.where(is_lower, limbs & MASK, limbs)


@triton.jit
def collect(stripes, scratch):
    """The sum of all stripes, carried: int64[LANES]. Leaves the stripes zero for the next call.

    Extreme keys are kept with the sign bit flipped and compared unsigned, so that zero is none.
    """
    lanes = tl.arange(0, LANES)
    inside = lanes < SUMS_LENGTH
    NONE: tl.constexpr = -9223372036854775808
    sums = tl.zeros([LANES], tl.int64)
    keys = tl.zeros([LANES], tl.int64) + NONE
    for stripe in range(STRIPES):
        part = tl.load(stripes + stripe * SUMS_LENGTH + lanes, mask=inside, other=0, volatile=True)
        sums += part
        keys = tl.maximum(keys, part ^ NONE)
    tl.debug_barrier()  # a lane may be read and cleared by different threads
    for stripe in range(STRIPES):
        tl.store(stripes + stripe * SUMS_LENGTH + lanes, sums * 0, mask=inside)
    limbs = carry(tl.where(lanes < LIMBS, sums, 0), scratch)
    return tl.where(lanes < LIMBS, limbs, tl.where(lanes == EXTREME, keys, sums))
