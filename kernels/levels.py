"""Exact sums by float64 accumulators on fixed grids.

An accumulator that starts at 2**(52 + grid) and stays in its binade is a multiple of 2**grid:
`grown = level + x; rest = x - (grown - level)` rounds x to the grid without an error anywhere, and
`rest` goes to the next, finer level. While a lane stays in one binade, the difference of its bits
and its start's *is* its sum in units of the grid: lanes are added as integers.
Source: the "prerounding" of S. M. Rump, T. Ogita, S. Oishi, "Accurate floating-point summation",
SIAM J. Sci. Comput. 31 (2008); P. Ahrens, J. Demmel, H. D. Nguyen, TOMS 46 (2020).
"""

import triton
import triton.language as tl

from .limbs import deposit, power_of_two

MOST_LEVELS = tl.constexpr(8)


@triton.jit
def start_bits(grid, level: tl.constexpr, WIDTH: tl.constexpr):
    """Bits of where the lanes of a level start.

    Rests have either sign: below the first level that is the middle of the binade.
    """
    HALF: tl.constexpr = 0 if level == 0 else 1 << 51
    return ((grid - level * WIDTH + 52 + 1023).to(tl.int64) << 52) + HALF


@triton.jit
def start_levels(grid, LEVELS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """The accumulators of an empty sum: a tuple of float64[TILE], grids WIDTH bits apart."""
    levels = ()
    for level in tl.static_range(LEVELS):
        start = start_bits(grid, level, WIDTH) + tl.zeros([TILE], tl.int64)
        levels = levels + (start.to(tl.float64, bitcast=True),)
    return levels


@triton.jit
def _sink(levels, rest, FIRST: tl.constexpr):
    """Adds a term a lane, from level FIRST on downwards."""
    kept = ()
    for level in tl.static_range(FIRST):
        kept = kept + (levels[level],)
    for level in tl.static_range(FIRST, len(levels) - 1):
        grown = levels[level] + rest
        rest = rest - (grown - levels[level])
        kept = kept + (grown,)
    return kept + (levels[len(levels) - 1] + rest,)


@triton.jit
def _sink_square(levels, x):
    """Adds x * x where that is exact in float64."""
    if len(levels) == 1:
        return (tl.fma(x, x, levels[0]),)
    grown = tl.fma(x, x, levels[0])
    rest = tl.fma(x, x, levels[0] - grown)
    return _sink((grown,) + levels[1:], rest, 1)


@triton.jit
def add_term(levels, x, P: tl.constexpr, SHORT_CUBES: tl.constexpr):
    """Adds |x|**P a lane, x in float32 or float64. For P = 1 and 3, x must not be negative.

    SHORT_CUBES: the cubes are exact in float32, which spares float64 multiplications.
    """
    if P == 3 and SHORT_CUBES:
        return _sink(levels, ((x * x) * x).to(tl.float64), 0)
    wide = x.to(tl.float64)
    if P == 1:
        return _sink(levels, wide, 0)
    elif P == 3:
        return _sink(levels, (wide * wide) * wide, 0)
    elif x.dtype == tl.float64:
        square = wide * wide
        levels = _sink(levels, square, 0)
        return _sink(levels, tl.fma(wide, wide, -square), 1)
    else:
        return _sink_square(levels, wide)


@triton.jit
def is_overfull(levels, grid):
    """Lanes whose first level left its binade, as it does for a NaN or an infinity."""
    return (levels[0] < power_of_two(grid + 53)) == 0


@triton.jit
def deposit_levels(limbs, levels, grid, scale, weight, WIDTH: tl.constexpr):
    """Adds the lanes of all levels, times 2**scale, to the limbs."""
    places = tl.arange(0, MOST_LEVELS)
    wholes = tl.zeros([MOST_LEVELS], tl.int64)
    for level in tl.static_range(len(levels)):
        bits = levels[level].to(tl.int64, bitcast=True)
        whole = tl.sum(bits - start_bits(grid, level, WIDTH), 0)
        wholes = tl.where(places == level, whole, wholes)
    deposit(limbs, wholes, grid - places * WIDTH + scale, weight)
