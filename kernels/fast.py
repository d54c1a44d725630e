"""The pass that almost every chunk takes: few levels, no masks, a check by carries.

Nothing is deposited unless all elements fit the window.
"""

import triton
import triton.language as tl

from .levels import add_term, deposit_levels, is_overfull, start_levels
from .walk import gather, load_ends
from .windows import carry_limit, is_flagged, note_small
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
def add_fitting(
    limbs, address, rows, row_length, row_stride, weight, data, head, words, tail, first, grid,
    threshold,
    P: tl.constexpr, DTYPE: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Adds the chunk to the limbs if all of it fits the window; whether it did."""
    lanes = tl.arange(0, TILE)
    levels = start_levels(grid, LEVELS, WIDTH, TILE)
    flags = tl.zeros([TILE], tl.int32)
    limit = carry_limit(threshold, DTYPE)
    STEP: tl.constexpr = AHEAD * TILE
    whole = tl.maximum(words // STEP, 1) * STEP
    ahead = first
    for start in range(STEP, whole, STEP):  # the next tiles are under way meanwhile
        following = ()
        for tile in tl.static_range(AHEAD):
            following = following + (tl.load(data + start + tile * TILE + lanes),)
        for tile in tl.static_range(AHEAD):
            levels, flags = _add_word(levels, flags, ahead[tile], limit, P, DTYPE)
        ahead = following
    for tile in tl.static_range(AHEAD):
        levels, flags = _add_word(levels, flags, ahead[tile], limit, P, DTYPE)
    for start in range(whole, words, TILE):
        word = tl.load(data + start + lanes, mask=start + lanes < words, other=0)
        levels, flags = _add_word(levels, flags, word, limit, P, DTYPE)
    if head + tail > 0:
        word = load_ends(address, row_length, head, tail, DTYPE, TILE)
        levels, flags = _add_word(levels, flags, word, limit, P, DTYPE)
    scattered = tl.where(rows == 1, 0, rows * row_length).to(tl.int32)
    for start in range(0, scattered, TILE):
        word = gather(address, start + lanes, scattered, row_length, row_stride, DTYPE)
        levels, flags = _add_word(levels, flags, word, limit, P, DTYPE)
    fits = tl.max((is_flagged(flags, DTYPE) | is_overfull(levels, grid)).to(tl.int32), 0) == 0
    if fits:
        deposit_levels(limbs, levels, grid, 0, weight, WIDTH)
    return fits
