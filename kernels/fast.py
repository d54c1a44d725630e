"""The pass that almost every chunk takes: few levels, no masks, a check by carries.

Nothing is deposited unless all elements fit the window. Where levels are what the pass waits for,
they are fewer, and a spare level below takes the few elements that are too small for them.
"""

import triton
import triton.language as tl

from .levels import add_term, deposit_levels, is_overfull, start_levels
from .walk import gather, load_ends
from .windows import carry_limit, is_flagged, note_small, split_small
from .words import magnitudes, narrow, narrow_upper


@triton.jit
def _add_word(levels, flags, word, limit, P: tl.constexpr, DTYPE: tl.constexpr):
    SHORT_CUBES: tl.constexpr = DTYPE == tl.bfloat16
    if DTYPE != tl.float16:  # all of float16 fits its window
        flags = note_small(flags, word, limit, DTYPE)
    if P != 2:
        word = magnitudes(word, DTYPE)
    levels = add_term(levels, narrow(word, DTYPE), P, SHORT_CUBES)
    if DTYPE == tl.bfloat16 or DTYPE == tl.float16:
        levels = add_term(levels, narrow_upper(word, DTYPE), P, SHORT_CUBES)
    return levels, flags


@triton.jit
def load_first(data, words, TILE: tl.constexpr, AHEAD: tl.constexpr):
    """The first tiles of a run: under way while the window is chosen."""
    lanes = tl.arange(0, TILE)
    tiles = ()
    for tile in tl.static_range(AHEAD):
        index = tile * TILE + lanes
        tiles = tiles + (tl.load(data + index, mask=index < words, other=0),)
    return tiles


@triton.jit
def _add_split(levels, spare, flags, word, limit, floor, P: tl.constexpr, DTYPE: tl.constexpr):
    """Adds a word, its small elements to the spare level, if there is one."""
    if len(spare) == 0:
        levels, flags = _add_word(levels, flags, word, limit, P, DTYPE)
    else:
        large, small = split_small(word, limit, DTYPE)
        levels, _ = _add_word(levels, flags, large, limit, P, DTYPE)
        spare, flags = _add_word(spare, flags, small, floor, P, DTYPE)
    return levels, spare, flags


@triton.jit
def _add_tiles(
    levels, spare, flags, tiles, data, start, words, limit, floor,
    P: tl.constexpr, DTYPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Adds the tiles that were loaded from `start` on, split where a spare level has to help."""
    if len(spare) == 0:
        for tile in tl.static_range(len(tiles)):
            levels, flags = _add_word(levels, flags, tiles[tile], limit, P, DTYPE)
    else:
        small = tl.zeros([TILE], tl.int32)
        for tile in tl.static_range(len(tiles)):
            small = note_small(small, tiles[tile], limit, DTYPE)
        if tl.max(is_flagged(small, DTYPE).to(tl.int32), 0) == 0:
            for tile in tl.static_range(len(tiles)):
                levels, _ = _add_word(levels, flags, tiles[tile], limit, P, DTYPE)
        else:
            for first in range(start, start + len(tiles) * TILE, TILE):
                index = first + tl.arange(0, TILE)
                word = tl.load(data + index, mask=index < words, other=0)
                levels, spare, flags = _add_split(
                    levels, spare, flags, word, limit, floor, P, DTYPE
                )
    return levels, spare, flags


@triton.jit
def add_fitting(
    limbs, address, rows, row_length, row_stride, weight, data, head, words, tail, first, grid,
    spare_grid, threshold, floor,
    P: tl.constexpr, DTYPE: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr,
    SPARE: tl.constexpr, TILE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Adds the chunk to the limbs if all of it fits the window; whether it did.

    threshold, floor: bits of the smallest magnitudes that fit the levels on `grid`, and those of
    the spare level on `spare_grid`. SPARE: how many there are, 0 or 1.
    """
    lanes = tl.arange(0, TILE)
    levels = start_levels(grid, LEVELS, WIDTH, TILE)
    spare = start_levels(spare_grid, SPARE, WIDTH, TILE)
    flags = tl.zeros([TILE], tl.int32)
    # A choice, since the compiler would multiply for each word what it can take apart.
    limit = tl.where(rows > 0, carry_limit(threshold, DTYPE), 0)
    low = carry_limit(floor, DTYPE)
    STEP: tl.constexpr = AHEAD * TILE
    whole = tl.maximum(words // STEP, 1) * STEP
    ahead = first
    for start in range(STEP, whole, STEP):  # the next tiles are under way meanwhile
        following = ()
        for tile in tl.static_range(AHEAD):
            following = following + (tl.load(data + start + tile * TILE + lanes),)
        levels, spare, flags = _add_tiles(
            levels, spare, flags, ahead, data, start - STEP, words, limit, low, P, DTYPE, TILE
        )
        ahead = following
    levels, spare, flags = _add_tiles(
        levels, spare, flags, ahead, data, whole - STEP, words, limit, low, P, DTYPE, TILE
    )
    for start in range(whole, words, TILE):
        word = tl.load(data + start + lanes, mask=start + lanes < words, other=0)
        levels, spare, flags = _add_split(levels, spare, flags, word, limit, low, P, DTYPE)
    if head + tail > 0:
        word = load_ends(address, row_length, head, tail, DTYPE, TILE)
        levels, spare, flags = _add_split(levels, spare, flags, word, limit, low, P, DTYPE)
    scattered = tl.where(rows == 1, 0, rows * row_length).to(tl.int32)
    for start in range(0, scattered, TILE):
        word = gather(address, start + lanes, scattered, row_length, row_stride, DTYPE)
        levels, spare, flags = _add_split(levels, spare, flags, word, limit, low, P, DTYPE)
    odd = is_flagged(flags, DTYPE) | is_overfull(levels, grid)
    if SPARE > 0:  # a window far up leaves it elements whose terms leave float32
        odd = odd | is_overfull(spare, spare_grid)
    fits = tl.max(odd.to(tl.int32), 0) == 0
    if fits:
        deposit_levels(limbs, levels, grid, 0, weight, WIDTH)
        deposit_levels(limbs, spare, spare_grid, 0, weight, WIDTH)
    return fits
