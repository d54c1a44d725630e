"""Gradients in place: multiplied by the factor of a clip, or limited in value.

The last chunk goes first: what the sums read last is still in the cache.
"""

import triton
import triton.language as tl

from .chunks import draw_chunk, find_chunk, is_last_program
from .walk import split_run


@triton.jit
def _to_bfloat16(wide):
    """Ties to even; NaN becomes the quiet NaN that the CPU engine writes."""
    bits = wide.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(wide != wide, 0x7FC0, rounded).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _times(x, factor, DTYPE: tl.constexpr):
    """x * factor: float64 in float64, narrower types in float32, then rounded to the type."""
    if DTYPE == tl.float64:
        return x * factor
    elif DTYPE == tl.bfloat16:
        return _to_bfloat16(x.to(tl.float32) * factor.to(tl.float32))
    else:
        return (x.to(tl.float32) * factor.to(tl.float32)).to(DTYPE)


@triton.jit
def _limited(x, limit, DTYPE: tl.constexpr):
    """x in [-limit, limit], for a limit that the type holds; NaN stays."""
    WIDE: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    wide = x.to(WIDE)
    bound = tl.full((), limit, WIDE)
    return tl.where(wide > bound, bound, tl.where(wide < -bound, -bound, wide)).to(DTYPE)


@triton.jit
def _change(places, mask, number, DTYPE: tl.constexpr, CLAMP: tl.constexpr):
    x = tl.load(places, mask=mask)
    x = _limited(x, number, DTYPE) if CLAMP else _times(x, number, DTYPE)
    tl.store(places, x, mask=mask)


@triton.jit
def _change_run(
    address, length, number, DTYPE: tl.constexpr, TILE: tl.constexpr, AHEAD: tl.constexpr,
    CLAMP: tl.constexpr, ITEM: tl.constexpr,
):  # fmt: skip
    """A run without gaps: whole tiles from its first 16-byte boundary carry no mask."""
    lanes = tl.arange(0, TILE)
    start = address.to(tl.pointer_type(DTYPE))
    head, words, _ = split_run(address, 1, length, ITEM, ITEM)
    if head > 0:
        _change(start + lanes, lanes < head, number, DTYPE, CLAMP)
    body = tl.multiple_of((address + head * ITEM).to(tl.pointer_type(DTYPE)), 16)
    STEP: tl.constexpr = AHEAD * TILE
    whole = words // STEP * STEP
    for first in range(0, whole, STEP):
        tiles = ()
        for tile in tl.static_range(AHEAD):
            tiles = tiles + (tl.load(body + first + tile * TILE + lanes),)
        for tile in tl.static_range(AHEAD):
            x = tiles[tile]
            x = _limited(x, number, DTYPE) if CLAMP else _times(x, number, DTYPE)
            tl.store(body + first + tile * TILE + lanes, x)
    for first in range(whole, words, TILE):
        _change(body + first + lanes, first + lanes < words, number, DTYPE, CLAMP)


@triton.jit
def _change_rows(
    address, rows, row_length, row_stride, number, DTYPE: tl.constexpr, TILE: tl.constexpr,
    CLAMP: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, TILE)
    start = address.to(tl.pointer_type(DTYPE))
    elements = (rows * row_length).to(tl.int32)
    for first in range(0, elements, TILE):
        index = first + lanes
        row = index // row_length.to(tl.int32)
        column = index - row * row_length.to(tl.int32)
        place = start + row.to(tl.int64) * row_stride + column
        _change(place, index < elements, number, DTYPE, CLAMP)


@triton.jit
def _change_chunks(
    segments, owners, turns, chunks, number, DTYPE: tl.constexpr, TILE: tl.constexpr,
    AHEAD: tl.constexpr, PARTS: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """Draws pieces of chunks one after the other: what is under way lies close together.

    Memory that is read and written mixes badly: programs that walk far apart get three quarters of
    the speed.
    """
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    turn = tl.program_id(0)
    while turn < chunks * PARTS:
        following = draw_chunk(turns)
        address, offset, rows, row_length, row_stride, _, _ = find_chunk(
            segments, owners, chunks - 1 - turn // PARTS
        )
        address += offset * ITEM
        part = PARTS - 1 - turn % PARTS
        if rows == 1:
            length = (row_length + PARTS - 1) // PARTS
            length = (length + 15) // 16 * 16
            start = tl.minimum(part * length, row_length)
            length = tl.minimum(length, row_length - start)
            _change_run(address + start * ITEM, length, number, DTYPE, TILE, AHEAD, CLAMP, ITEM)
        elif part == 0:
            _change_rows(address, rows, row_length, row_stride, number, DTYPE, TILE, CLAMP)
        turn = following
    is_last_program(turns)


@triton.jit
def scale(segments, owners, factor, turns, chunks, DTYPE: tl.constexpr, TILE: tl.constexpr,
          AHEAD: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Multiplies every element by the float64 at `factor`; a factor of 1 writes nothing.

    turns: int32[2], zero before and after. PARTS: pieces of a chunk.
    """
    number = tl.load(factor)
    if number != 1.0:
        _change_chunks(segments, owners, turns, chunks, number, DTYPE, TILE, AHEAD, PARTS, False)


@triton.jit
def clamp(segments, owners, limit, turns, chunks, DTYPE: tl.constexpr, TILE: tl.constexpr,
          AHEAD: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Limits every element to [-limit, limit] (float64, a value of the type). Not for complex."""
    _change_chunks(segments, owners, turns, chunks, limit, DTYPE, TILE, AHEAD, PARTS, True)
