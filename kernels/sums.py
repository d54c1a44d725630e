"""One pass over the gradients of one dtype: the exact sum of |x|**P, P = 1, 2 or 3.

A grid of programs walks the chunks. Each chunk gets a window from a sample of it and goes the fast
way; what fits no window goes band by band. The last program to end finishes: total and coefficient.
"""

import triton
import triton.language as tl

from .chunks import draw_chunk, find_chunk
from .fast import add_fitting, load_first
from .finish import POWER, SQUARES, SUM, finish_if_last
from .limbs import STRIPES, SUMS_LENGTH
from .redo import add_in_bands
from .walk import gather, split_run
from .windows import (
    carry_limit,
    exponent_of,
    first_grid,
    is_flagged,
    note_small,
    smallest_exponent,
    threshold_bits,
)
from .words import magnitudes


@triton.jit
def _largest(word, DTYPE: tl.constexpr):
    """Bits of the largest magnitude in a tile of words."""
    word = magnitudes(word, DTYPE)
    if DTYPE == tl.bfloat16 or DTYPE == tl.float16:
        word = tl.maximum(word & 0xFFFF, word >> 16)
    return tl.max(word, 0)


@triton.jit
def _middle(word, exponent, DTYPE: tl.constexpr):
    """Exponent halfway between the largest one of a sample and that of its smallest non-zero."""
    word = magnitudes(word, DTYPE)
    if DTYPE == tl.bfloat16 or DTYPE == tl.float16:
        upper = word >> 16
        lower = word & 0xFFFF
        word = tl.minimum(tl.where(lower == 0, 0x7FFF, lower), tl.where(upper == 0, 0x7FFF, upper))
    smallest = tl.min(tl.where(word == 0, magnitudes(~word, DTYPE), word), 0)
    low = tl.minimum(exponent_of(smallest, DTYPE), exponent)
    return (low + exponent + 2048) // 2 - 1024


@triton.jit
def _sample(
    first, address, rows, row_length, row_stride, is_known, DTYPE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Words that tell the chunk's size of elements, and the bits of the largest one.

    The first tile, which is read anyway; zeros tell nothing, so where no window is known either,
    elements from all over the chunk.
    """
    word = first
    largest = _largest(word, DTYPE)
    if (largest == 0) & (is_known == 0):
        elements = (rows * row_length).to(tl.int32)
        index = tl.arange(0, TILE) * ((elements + TILE - 1) // TILE)
        word = gather(address, index, elements, row_length, row_stride, DTYPE)
        largest = _largest(word, DTYPE)
    return word, largest


@triton.jit
def sums(
    segments, owners, stripes, details, turns, scratch, output, result,
    chunks, then, max_norm, eps, loss_scale,
    P: tl.constexpr, DTYPE: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr,
    SPARE: tl.constexpr, GROWTH: tl.constexpr, SLACK: tl.constexpr, TILE: tl.constexpr,
    AHEAD: tl.constexpr,
    BAND_LEVELS: tl.constexpr, BAND_WIDTH: tl.constexpr, BAND_GROWTH: tl.constexpr,
    BAND_TILE: tl.constexpr,
):  # fmt: skip
    """Sums all chunks; see `finish.finish_if_last` for what follows (`then`).

    segments, owners: the work list (chunks.py). stripes: int64[STRIPES, SUMS_LENGTH], zero before
    and after. details: int64[tensors, SUMS_LENGTH] to get sums by tensor, or null.
    At most 2**GROWTH elements of a chunk fall to one of the TILE lanes, 2**BAND_GROWTH to one of
    BAND_TILE.
    """
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    WORD: tl.constexpr = 8 if ITEM == 8 else 4
    SAFE: tl.constexpr = 480 if P == 2 else 900
    INFINITE: tl.constexpr = 1024 if DTYPE == tl.float64 else 128
    stripe = stripes + tl.program_id(0) % STRIPES * SUMS_LENGTH
    exponent = 0
    is_known = 0
    number = tl.program_id(0)
    while number < chunks:
        following = draw_chunk(turns)
        address, offset, rows, row_length, row_stride, weight, tensor = find_chunk(
            segments, owners, number
        )
        address += offset * ITEM
        head, words, tail = split_run(address, rows, row_length, ITEM, WORD)
        data = (address + head * ITEM).to(tl.pointer_type(tl.int64 if WORD == 8 else tl.int32))
        data = tl.multiple_of(data, 16)
        first = load_first(data, words, TILE, AHEAD)
        sample, largest = _sample(
            first[0], address, rows, row_length, row_stride, is_known, DTYPE, TILE
        )
        if largest != 0:  # all zeros: the window of the chunk before will do
            exponent = exponent_of(largest, DTYPE)
            is_known = 1
        grid = first_grid(exponent, P, DTYPE, GROWTH, SLACK)
        smallest = smallest_exponent(grid - (LEVELS - 1) * WIDTH, P, DTYPE)
        threshold = threshold_bits(smallest, DTYPE)
        spare_grid = grid
        floor = threshold
        if SPARE > 0:
            spare_grid = P * smallest + GROWTH + 1 - 52
            floor = threshold_bits(smallest_exponent(spare_grid, P, DTYPE), DTYPE)
        target = stripe
        if details.to(tl.int64) != 0:
            target = details + tensor * SUMS_LENGTH
        is_finite = exponent < INFINITE
        is_wide = is_finite == 0
        if DTYPE != tl.float16:
            small = note_small(tl.zeros([TILE], tl.int32), sample, carry_limit(floor, DTYPE), DTYPE)
            is_wide = is_wide | (tl.max(is_flagged(small, DTYPE).to(tl.int32), 0) != 0)
        if DTYPE == tl.float64:
            is_wide = is_wide | (exponent > SAFE) | (exponent < -SAFE)
        fits = False
        if is_wide == 0:
            fits = add_fitting(
                target, address, rows, row_length, row_stride, weight, data, head, words, tail,
                first, grid, spare_grid, threshold, floor, P, DTYPE, LEVELS, WIDTH, SPARE, TILE,
                AHEAD,
            )  # fmt: skip
        if fits == 0:
            add_in_bands(
                target, address, rows, row_length, row_stride, weight, data, head, words, tail,
                _middle(sample, exponent, DTYPE), (is_finite == 0).to(tl.int32), P, DTYPE,
                BAND_LEVELS, BAND_WIDTH, BAND_GROWTH, BAND_TILE, AHEAD,
            )  # fmt: skip
        if is_finite == 0:
            is_known = 0
            exponent = 0
        number = following
    KIND: tl.constexpr = POWER if P == 3 else SQUARES if P == 2 else SUM
    finish_if_last(
        stripes, turns, scratch, output, result, then, max_norm, eps, loss_scale,
        eps * 0.0 + P, KIND,
    )  # fmt: skip
