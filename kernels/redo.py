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
from .words import fraction_bits, infinity_bits, magnitudes, narrow, narrow_upper

NEVER = tl.constexpr(1 << 20)


@triton.jit
def _power_of_two_wide(exponent):
    """2**exponent in float64, subnormals, 0 and infinity included."""
    half = exponent // 2
    return power_of_two(half) * power_of_two(exponent - half)


@triton.jit
def _add_in_band(levels, odd, x, lower, upper, down, P: tl.constexpr):
    kept = tl.where((x >= lower) & (x < upper), x, 0.0)
    odd = odd | (kept != x).to(tl.int32)
    if x.dtype == tl.float64:
        kept = (kept * down) * down  # squares of float64 need the scale
    return add_term(levels, kept, P, False), odd


@triton.jit
def _add_word(levels, odd, word, lower, upper, down, P: tl.constexpr, DTYPE: tl.constexpr):
    word = magnitudes(word, DTYPE)
    levels, odd = _add_in_band(levels, odd, narrow(word, DTYPE), lower, upper, down, P)
    if DTYPE == tl.bfloat16 or DTYPE == tl.float16:
        x = narrow_upper(word, DTYPE)
        levels, odd = _add_in_band(levels, odd, x, lower, upper, down, P)
    return levels, odd


@triton.jit
def _add_band(
    limbs, address, rows, row_length, row_stride, weight, data, head, words, tail, high,
    P: tl.constexpr, DTYPE: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr,
    GROWTH: tl.constexpr, TILE: tl.constexpr, AHEAD: tl.constexpr, BAND: tl.constexpr,
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
    lower = _power_of_two_wide(high - BAND).to(tl.float64 if IS_DOUBLE else tl.float32)
    upper = _power_of_two_wide(high).to(lower.dtype)
    down = power_of_two(-(high // 2))
    STEP: tl.constexpr = AHEAD * TILE
    whole = words // STEP * STEP
    for start in range(0, whole, STEP):
        tiles = ()
        for tile in tl.static_range(AHEAD):
            tiles = tiles + (tl.load(data + start + tile * TILE + lanes),)
        for tile in tl.static_range(AHEAD):
            levels, odd = _add_word(levels, odd, tiles[tile], lower, upper, down, P, DTYPE)
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
    limbs, address, rows, row_length, row_stride, weight, DTYPE: tl.constexpr, TILE: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Counts what is not finite; the exponents of the smallest and largest magnitude but zero."""
    INFINITE: tl.constexpr = infinity_bits(DTYPE)
    lanes = tl.arange(0, TILE)
    INT: tl.constexpr = tl.int64 if DTYPE == tl.float64 else tl.int32
    largest = tl.zeros([TILE], INT)
    smallest = tl.zeros([TILE], INT) + INFINITE
    nan = tl.zeros([TILE], tl.int32)
    infinite = tl.zeros([TILE], tl.int32)
    negative = tl.zeros([TILE], tl.int32)
    elements = (rows * row_length).to(tl.int32)
    for start in range(0, elements, AHEAD * TILE):
        words = ()
        for tile in tl.static_range(AHEAD):
            index = start + tile * TILE + lanes
            words = words + (gather(address, index, elements, row_length, row_stride, DTYPE),)
        for tile in tl.static_range(AHEAD):
            word = words[tile]
            bits = magnitudes(word, DTYPE)
            nan += (bits > INFINITE).to(tl.int32)
            infinite += (bits == INFINITE).to(tl.int32)
            negative += ((bits == INFINITE) & (bits != word)).to(tl.int32)
            largest = tl.maximum(largest, tl.where(bits < INFINITE, bits, 0))
            smallest = tl.minimum(smallest, tl.where(bits > 0, bits, INFINITE))
    below_zero = tl.sum(negative, 0)
    count(limbs + NAN, tl.sum(nan, 0), weight)
    count(limbs + POSITIVE_INFINITY, tl.sum(infinite, 0) - below_zero, weight)
    count(limbs + NEGATIVE_INFINITY, below_zero, weight)
    low = exponent_of(tl.min(smallest, 0), DTYPE)
    high = exponent_of(tl.max(largest, 0), DTYPE)
    return low, high, tl.max(largest, 0) > 0


@triton.constexpr_function
def band_exponents(p, dtype, levels, width, growth):
    """Exponents that a band holds, even."""
    depth = 52 + (levels - 1) * width - growth - 1
    return ((depth - 52) // 3 if p == 3 else depth // p - fraction_bits(dtype)) // 2 * 2


@triton.jit
def add_in_bands(
    limbs, address, rows, row_length, row_stride, weight, data, head, words, tail, middle,
    needs_census,
    P: tl.constexpr, DTYPE: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr,
    GROWTH: tl.constexpr, TILE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Adds the chunk to the limbs: a band around 2**middle first, or else a census.

    A sample's smallest and largest elements lie about as far inside of the chunk's.
    """
    BAND: tl.constexpr = band_exponents(P, DTYPE, LEVELS, WIDTH, GROWTH)
    high = (middle + BAND // 2 + 2048) // 2 * 2 - 2048  # even
    band = high * 0
    last = band
    done = band + NEVER
    is_counted = band
    pending = needs_census
    while band >= last:
        odd = pending
        if (pending == 0) & (band != done):
            odd = _add_band(
                limbs, address, rows, row_length, row_stride, weight, data, head, words, tail,
                high + band * BAND, P, DTYPE, LEVELS, WIDTH, GROWTH, TILE, AHEAD, BAND,
            )  # fmt: skip
        if (odd != 0) & (is_counted == 0):
            low, top, any_finite = _take_census(
                limbs, address, rows, row_length, row_stride, weight, DTYPE, TILE, AHEAD
            )
            is_counted += 1
            if pending != 0:
                high = (top + 2 + 2048) // 2 * 2 - 2048  # just above the largest, even
            else:
                done = band
            band = (top - high + BAND * 64) // BAND - 63  # the band that holds 2**top
            last = (low - high + BAND * 64) // BAND - 63
            last = tl.where(any_finite, last, band + 1)
            band += 1
        pending = 0
        band -= 1
