"""The pass for chunks that fit no window: many levels, band by band, exact for anything.

A band is a range of exponents that the levels hold without a check. Elements outside, NaN and
infinities are left out and looked for by a census, which then says which bands are needed.
"""

import triton
import triton.language as tl

from .levels import add_term, deposit_levels, start_levels
from .limbs import NAN, NEGATIVE_INFINITY, POSITIVE_INFINITY, count, power_of_two
from .walk import gather, load_ends
from .windows import exponent_of
from .words import fraction_bits, infinity_bits, magnitudes, widen, widen_upper

NEVER = tl.constexpr(1 << 20)


@triton.jit
def _power_of_two_wide(exponent):
    """2**exponent in float64, subnormals, 0 and infinity included."""
    half = exponent // 2
    return power_of_two(half) * power_of_two(exponent - half)


@triton.jit
def _add_in_band(levels, odd, x, lower, upper, down, P: tl.constexpr, IS_DOUBLE: tl.constexpr):
    inside = (x >= lower) & (x < upper)
    odd = odd | ((inside | (x == 0)) == 0).to(tl.int32)
    x = tl.where(inside, x, 0.0)
    if IS_DOUBLE:
        x = (x * down) * down                # squares and cubes of float64 need the scale
    return add_term(levels, x, P, IS_DOUBLE), odd


@triton.jit
def _add_word(levels, odd, word, lower, upper, down, P: tl.constexpr, DTYPE: tl.constexpr):
    word = magnitudes(word, DTYPE)
    IS_DOUBLE: tl.constexpr = DTYPE == tl.float64
    levels, odd = _add_in_band(levels, odd, widen(word, DTYPE), lower, upper, down, P, IS_DOUBLE)
    if DTYPE == tl.bfloat16 or DTYPE == tl.float16:
        x = widen_upper(word, DTYPE)
        levels, odd = _add_in_band(levels, odd, x, lower, upper, down, P, IS_DOUBLE)
    return levels, odd


@triton.jit
def _add_band(
    limbs, address, rows, row_length, row_stride, weight, head, words, tail, high,
    P: tl.constexpr, DTYPE: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr,
    GROWTH: tl.constexpr, TILE: tl.constexpr, BAND: tl.constexpr, WORD: tl.constexpr,
    ITEM: tl.constexpr,
):  # fmt: skip
    """Adds the elements in [2**(high - BAND), 2**high); whether others but zeros were met.

    `high` must be even for float64, whose elements are scaled by 2**-(high / 2) twice.
    """
    lanes = tl.arange(0, TILE)
    IS_DOUBLE: tl.constexpr = DTYPE == tl.float64
    base = 0 if IS_DOUBLE else high
    grid = P * base + GROWTH + 1 - 52 + 0 * high
    levels = start_levels(grid, LEVELS, WIDTH, TILE)
    odd = tl.zeros([TILE], tl.int32)
    lower = _power_of_two_wide(high - BAND)
    upper = _power_of_two_wide(high)
    down = power_of_two(-(high // 2))
    data = (address + head * ITEM).to(tl.pointer_type(tl.int64 if WORD == 8 else tl.int32))
    data = tl.multiple_of(data, 16)
    whole = words // (2 * TILE) * (2 * TILE)
    for start in range(0, whole, 2 * TILE):
        first = tl.load(data + start + lanes)
        second = tl.load(data + start + TILE + lanes)
        levels, odd = _add_word(levels, odd, first, lower, upper, down, P, DTYPE)
        levels, odd = _add_word(levels, odd, second, lower, upper, down, P, DTYPE)
    for start in range(whole, words, TILE):
        word = tl.load(data + start + lanes, mask=start + lanes < words, other=0)
        levels, odd = _add_word(levels, odd, word, lower, upper, down, P, DTYPE)
    if head + tail > 0:
        word = load_ends(address, row_length, head, tail, DTYPE, TILE)
        levels, odd = _add_word(levels, odd, word, lower, upper, down, P, DTYPE)
    scattered = tl.where(rows == 1, 0, rows * row_length).to(tl.int32)
    for start in range(0, scattered, TILE):
        word = gather(address, start + lanes, scattered, row_length, row_stride, DTYPE)
        levels, odd = _add_word(levels, odd, word, lower, upper, down, P, DTYPE)
    deposit_levels(limbs, levels, grid, P * (high - base), weight, WIDTH)
    return tl.max(odd, 0)


@triton.jit
def _take_census(
    limbs, address, rows, row_length, row_stride, weight, DTYPE: tl.constexpr, TILE: tl.constexpr
):
    """Counts what is not finite; the exponents of the smallest and largest magnitude but zero."""
    INFINITE: tl.constexpr = infinity_bits(DTYPE)
    lanes = tl.arange(0, TILE)
    largest = tl.zeros([TILE], tl.int64)
    smallest = tl.zeros([TILE], tl.int64) + INFINITE
    nan = tl.zeros([TILE], tl.int32)
    infinite = tl.zeros([TILE], tl.int32)
    negative = tl.zeros([TILE], tl.int32)
    elements = (rows * row_length).to(tl.int32)
    for start in range(0, elements, TILE):
        word = gather(address, start + lanes, elements, row_length, row_stride, DTYPE)
        bits = magnitudes(word, DTYPE).to(tl.int64)
        nan += (bits > INFINITE).to(tl.int32)
        is_infinite = bits == INFINITE
        infinite += is_infinite.to(tl.int32)
        negative += (is_infinite & (bits != word.to(tl.int64))).to(tl.int32)
        largest = tl.maximum(largest, tl.where(bits < INFINITE, bits, 0))
        smallest = tl.minimum(smallest, tl.where(bits > 0, bits, INFINITE))
    below_zero = tl.sum(negative, 0)
    count(limbs + NAN, tl.sum(nan, 0), weight)
    count(limbs + POSITIVE_INFINITY, tl.sum(infinite, 0) - below_zero, weight)
    count(limbs + NEGATIVE_INFINITY, below_zero, weight)
    SMALL: tl.constexpr = tl.int64 if DTYPE == tl.float64 else tl.int32
    low = exponent_of(tl.min(smallest, 0).to(SMALL), DTYPE)
    high = exponent_of(tl.max(largest, 0).to(SMALL), DTYPE)
    return low, high, tl.max(largest, 0) > 0


@triton.constexpr_function
def band_exponents(p, dtype, levels, width, growth):
    """Exponents that a band holds, even."""
    depth = 52 + (levels - 1) * width - growth - 1
    return ((depth - 52) // 3 if p == 3 else depth // p - fraction_bits(dtype)) // 2 * 2


@triton.jit
def add_in_bands(
    limbs, address, rows, row_length, row_stride, weight, head, words, tail, high, needs_census,
    P: tl.constexpr, DTYPE: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr,
    GROWTH: tl.constexpr, TILE: tl.constexpr, WORD: tl.constexpr, ITEM: tl.constexpr,
):  # fmt: skip
    """Adds the chunk to the limbs. The first band ends at 2**high, unless a census comes first."""
    BAND: tl.constexpr = band_exponents(P, DTYPE, LEVELS, WIDTH, GROWTH)
    high = (high + 2048) // 2 * 2 - 2048                     # even
    band = high * 0
    last = band
    done = band + NEVER
    is_counted = band
    pending = needs_census
    while band >= last:
        odd = pending
        if (pending == 0) & (band != done):
            odd = _add_band(
                limbs, address, rows, row_length, row_stride, weight, head, words, tail,
                high + band * BAND, P, DTYPE, LEVELS, WIDTH, GROWTH, TILE, BAND, WORD, ITEM,
            )  # fmt: skip
        if (odd != 0) & (is_counted == 0):
            low, top, any_finite = _take_census(
                limbs, address, rows, row_length, row_stride, weight, DTYPE, TILE
            )
            is_counted += 1
            if pending != 0:
                high = (top + 2 + 2048) // 2 * 2 - 2048      # just above the largest, even
            else:
                done = band
            band = (top - high + BAND * 64) // BAND - 63     # the band that holds 2**top
            last = (low - high + BAND * 64) // BAND - 63
            last = tl.where(any_finite, last, band + 1)
            band += 1
        pending = 0
        band -= 1
