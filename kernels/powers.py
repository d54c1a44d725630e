"""One pass for every other norm type: terms |x|**p in float64; complex moduli for all but p = 2.

The slow way, for rare p: each chunk is walked once to count and to find the range of its terms, and
once more for each band of exponents that they take. Integer p: binary powering in double-double,
the steps of the CPU engine; other p: the device's float64 `pow`.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from .chunks import draw_chunk, find_chunk
from .double_double import times
from .finish import COUNT, MAX, MIN, POWER, SUM, collect_if_last
from .levels import add_term, deposit_levels, start_levels
from .limbs import (
    BASE,
    EXTREME,
    MISFITS,
    NAN,
    NEGATIVE_INFINITY,
    POSITIVE_INFINITY,
    STRIPES,
    SUMS_LENGTH,
    ZEROS,
    count,
    power_of_two,
)
from .moduli import modulus
from .roots import times_power_of_two
from .windows import exponent_of
from .words import load_elements, widen

SMALLEST_TERM = tl.constexpr(2.0**-960)
LARGEST_TERM = tl.constexpr(2.0**1000)


@triton.jit
def _values(address, index, elements, row_length, row_stride, DTYPE: tl.constexpr,
            IS_COMPLEX: tl.constexpr):  # fmt: skip
    """Elements of a chunk in float64: reals with their sign, or |z|; 0 past the end."""
    row = index // row_length.to(tl.int32)
    offset = row.to(tl.int64) * row_stride + (index - row * row_length.to(tl.int32))
    inside = index < elements
    if IS_COMPLEX:
        real = widen(load_elements(address, 2 * offset, inside, DTYPE), DTYPE)
        imaginary = widen(load_elements(address, 2 * offset + 1, inside, DTYPE), DTYPE)
        return modulus(real, imaginary)
    else:
        return widen(load_elements(address, offset, inside, DTYPE), DTYPE)


@triton.jit
def _power(x, p):
    """x**p of positive finite float64."""
    term = x
    p = tl.full((), p, tl.float64)
    if (p > 0) & (tl.floor(p) == p) & (p < 4294967296.0):
        whole = p.to(tl.int64)
        top = (p.to(tl.int64, bitcast=True) >> 52).to(tl.int32) - 1023
        zero = x * 0.0
        high = x
        low = zero
        for step in range(top):
            high, low = times(high, low, high, low)
            more_high, more_low = times(high, low, x, zero)
            is_set = ((whole >> (top - 1 - step).to(tl.int64)) & 1) == 1
            high = tl.where(is_set, more_high, high)
            low = tl.where(is_set, more_low, low)
        term = high + low
    else:
        term = libdevice.pow(x, p + 0.0 * x)
    return term


@triton.jit
def _terms(value, kind, p, exponent, divisor):
    """What each element adds to the sum; 0 where it has no term or a term out of range."""
    x = tl.abs(value)
    is_some = (x > 0) & (x < float("inf"))
    x = tl.where(is_some, x, 1.0)
    term = x
    if kind == POWER:
        x = tl.where(divisor > 0, x / divisor, times_power_of_two(x, -exponent))
        is_some = is_some & (x > 0)
        term = _power(tl.where(is_some, x, 1.0), p)
        is_some = is_some & (term >= SMALLEST_TERM) & (term <= LARGEST_TERM)
    return tl.where(is_some, term, 0.0)


@triton.jit
def _take_census(
    limbs, address, elements, row_length, row_stride, weight, kind, p, exponent, divisor,
    DTYPE: tl.constexpr, IS_COMPLEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Counts, the extreme magnitude, and bits of the smallest and largest term but 0."""
    lanes = tl.arange(0, TILE)
    INFINITE: tl.constexpr = 0x7FF0000000000000
    NONE: tl.constexpr = -9223372036854775808
    nan = tl.zeros([TILE], tl.int32)
    positive = tl.zeros([TILE], tl.int32)
    negative = tl.zeros([TILE], tl.int32)
    zeros = tl.zeros([TILE], tl.int32)
    misfits = tl.zeros([TILE], tl.int32)
    others = tl.zeros([TILE], tl.int32)
    keys = tl.zeros([TILE], tl.int64) + NONE
    largest = tl.zeros([TILE], tl.int64)
    smallest = tl.zeros([TILE], tl.int64) + INFINITE
    for start in range(0, elements, TILE):
        index = start + lanes
        inside = index < elements
        value = _values(address, index, elements, row_length, row_stride, DTYPE, IS_COMPLEX)
        nan += (value != value).to(tl.int32)
        positive += (value == float("inf")).to(tl.int32)
        negative += (value == -float("inf")).to(tl.int32)
        zeros += (inside & (value == 0)).to(tl.int32)
        others += (value != 0).to(tl.int32)
        key = tl.abs(value).to(tl.int64, bitcast=True)
        key = tl.where(kind == MIN, ~key, key)
        keys = tl.maximum(keys, tl.where(inside & (value == value), key, NONE))
        terms = _terms(value, kind, p, exponent, divisor).to(tl.int64, bitcast=True)
        is_finite = (value == value) & (tl.abs(value) < float("inf"))
        misfits += (is_finite & (value != 0) & (terms == 0)).to(tl.int32)
        largest = tl.maximum(largest, terms)
        smallest = tl.minimum(smallest, tl.where(terms > 0, terms, INFINITE))
    count(limbs + NAN, tl.sum(nan, 0), weight)
    count(limbs + POSITIVE_INFINITY, tl.sum(positive, 0), weight)
    count(limbs + NEGATIVE_INFINITY, tl.sum(negative, 0), weight)
    if (kind == POWER) & (p < 0):
        count(limbs + ZEROS, tl.sum(zeros, 0), weight)
    if (kind == POWER) & (exponent == 0) & (divisor == 0):
        count(limbs + MISFITS, tl.sum(misfits, 0), weight)
    if kind == COUNT:
        count(limbs + -BASE // 32, tl.sum(others, 0), weight)
    best = tl.max(keys, 0)
    if ((kind == MAX) | (kind == MIN)) & (best != NONE):
        place = (limbs + EXTREME).to(tl.pointer_type(tl.uint64))
        tl.atomic_max(place, (best ^ NONE).to(tl.uint64, bitcast=True), sem="relaxed")
    return tl.min(smallest, 0), tl.max(largest, 0)


@triton.jit
def _add_band(limbs, address, elements, row_length, row_stride, weight, kind, p, exponent, divisor,
              high, DTYPE: tl.constexpr, IS_COMPLEX: tl.constexpr, TILE: tl.constexpr,
              LEVELS: tl.constexpr, WIDTH: tl.constexpr, GROWTH: tl.constexpr,
              BAND: tl.constexpr):  # fmt: skip
    """Adds the terms in [2**(high - BAND), 2**high), `high` even."""
    lanes = tl.arange(0, TILE)
    grid = GROWTH + 1 - 52 + 0 * high
    levels = start_levels(grid, LEVELS, WIDTH, TILE)
    lower = times_power_of_two(1.0 + 0.0 * p, high - BAND)
    upper = times_power_of_two(1.0 + 0.0 * p, high)
    down = power_of_two(-(high // 2))
    for start in range(0, elements, TILE):
        value = _values(address, start + lanes, elements, row_length, row_stride, DTYPE, IS_COMPLEX)
        term = _terms(value, kind, p, exponent, divisor)
        term = tl.where((term >= lower) & (term < upper), term, 0.0)
        levels = add_term(levels, (term * down) * down, 1, False)
    deposit_levels(limbs, levels, grid, high, weight, WIDTH)


@triton.jit
def powers(
    segments, owners, stripes, details, turns, scratch, output, result,
    chunks, then, kind, p, exponent, divisor,
    DTYPE: tl.constexpr, IS_COMPLEX: tl.constexpr, TILE: tl.constexpr, LEVELS: tl.constexpr,
    WIDTH: tl.constexpr, GROWTH: tl.constexpr,
):  # fmt: skip
    """Sums |x|**p of the elements divided by `divisor`, or by 2**exponent where that is 0.

    kind: COUNT, SUM, POWER, MAX or MIN of finish.py. DTYPE: of an element, or of a complex one's
    parts. then: NOTHING or COLLECT; the host takes the root. Other arguments as in `sums.sums`;
    `result` is not used.
    """
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8 * (2 if IS_COMPLEX else 1)
    BAND: tl.constexpr = (52 + (LEVELS - 1) * WIDTH - GROWTH - 1 - 52) // 2 * 2
    stripe = stripes + tl.program_id(0) % STRIPES * SUMS_LENGTH
    number = tl.program_id(0)
    while number < chunks:
        following = draw_chunk(turns)
        address, offset, rows, row_length, row_stride, weight, tensor = find_chunk(
            segments, owners, number
        )
        address += offset * ITEM
        target = stripe
        if details.to(tl.int64) != 0:
            target = details + tensor * SUMS_LENGTH
        elements = (rows * row_length).to(tl.int32)
        smallest, largest = _take_census(
            target, address, elements, row_length, row_stride, weight, kind, p, exponent, divisor,
            DTYPE, IS_COMPLEX, TILE,
        )  # fmt: skip
        if (largest > 0) & ((kind == SUM) | (kind == POWER)):
            high = (exponent_of(largest, tl.float64) + 2 + 2048) // 2 * 2 - 2048
            low = exponent_of(smallest, tl.float64)
            while high > low:
                _add_band(
                    target, address, elements, row_length, row_stride, weight, kind, p, exponent,
                    divisor, high, DTYPE, IS_COMPLEX, TILE, LEVELS, WIDTH, GROWTH, BAND,
                )  # fmt: skip
                high -= BAND
        number = following
    collect_if_last(stripes, turns, scratch, output, then)
