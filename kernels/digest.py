"""The digest of bits and positions: `python/gradclip/reference/digest.py` defines it.

Tensors lie in memory in their logical order, so a word's number is its distance from the first one,
in words of 16 or of 32 bits: bfloat16 and float32 stand for all types of such words. What is mixed
serves the two words of a pair: for each 32 bits that are read, integer multiplications are what the
pass has to hide behind memory.
"""

import triton
import triton.language as tl

from .chunks import draw_chunk, find_chunk, is_last_program
from .walk import load_ends, split_run

STEP = tl.constexpr(0x9E3779B97F4A7C15)
FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB)
ROTATION = tl.constexpr(27)


@triton.jit
def _input(k):
    """What is mixed for word k (uint64) and the other one of its pair."""
    return ((k >> 1) + 1) * STEP


@triton.jit
def _mixed(x):
    x = (x ^ (x >> 32)) * FIRST_FACTOR
    x = (x ^ (x >> 32)) * SECOND_FACTOR
    return x ^ (x >> 32)


@triton.jit
def _rotated(x):
    return (x << ROTATION) | (x >> (64 - ROTATION))


@triton.jit
def _lower(word):
    return (word & 0xFFFF).to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def _upper(word):
    return ((word >> 16) & 0xFFFF).to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def _add_pair(total, word, x, IS_EVEN: tl.constexpr):
    """Adds two 16-bit words, the lower one even or odd, whose pair has the input x."""
    if IS_EVEN:
        mixed = _mixed(x)
        total += (mixed | 1) * _lower(word)
        total += (_rotated(mixed) | 1) * _upper(word)
    else:  # the upper one belongs to the next pair
        total += (_rotated(_mixed(x)) | 1) * _lower(word)
        total += (_mixed(x + STEP) | 1) * _upper(word)
    return total


@triton.jit
def _add_single(total, word, x, is_odd):
    """Adds a word that is alone in 32 bits."""
    mixed = _mixed(x)
    weight = tl.where(is_odd, _rotated(mixed), mixed) | 1
    return total + weight * word.to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def _add(total, word, x, is_odd, IS_EVEN: tl.constexpr, HALVES: tl.constexpr):
    if HALVES:
        return _add_pair(total, word, x, IS_EVEN)
    else:
        return _add_single(total, word, x, is_odd)


@triton.jit
def _add_run(
    total, data, words, k, IS_EVEN: tl.constexpr, HALVES: tl.constexpr, TILE: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Adds 32-bit loads from an aligned address on, the first of which holds word k (uint64)."""
    lanes = tl.arange(0, TILE)
    PAIRS: tl.constexpr = TILE if HALVES else TILE // 2  # of a tile
    NEXT: tl.constexpr = PAIRS * 0x9E3779B97F4A7C15 % 2**64
    number = k + lanes.to(tl.uint64) * (2 if HALVES else 1)
    is_odd = (number & 1) == 1
    x = _input(number)
    STEPS: tl.constexpr = AHEAD * TILE
    whole = words // STEPS * STEPS
    for start in range(0, whole, STEPS):
        tiles = ()
        for tile in tl.static_range(AHEAD):
            tiles = tiles + (tl.load(data + start + tile * TILE + lanes),)
        for tile in tl.static_range(AHEAD):
            total = _add(total, tiles[tile], x, is_odd, IS_EVEN, HALVES)
            x += NEXT
    for start in range(whole, words, TILE):
        word = tl.load(data + start + lanes, mask=start + lanes < words, other=0)
        total = _add(total, word, x, is_odd, IS_EVEN, HALVES)
        x += NEXT
    return total


@triton.jit
def _add_ends(total, address, length, head, tail, k, DTYPE: tl.constexpr, TILE: tl.constexpr):
    """Adds what `_add_run` leaves of a run whose first word is k."""
    lanes = tl.arange(0, TILE)
    word = load_ends(address, length, head, tail, DTYPE, TILE)
    number = k + tl.where(lanes < head, lanes, length.to(tl.int32) - tail - head + lanes).to(
        tl.uint64
    )
    return _add_single(total, word, _input(number), (number & 1) == 1)


@triton.jit
def digest(
    segments, owners, digests, turns, chunks,
    DTYPE: tl.constexpr, TILE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Adds the digests of all chunks to those of their tensors, int64[tensors].

    segments, owners: the work list (chunks.py) of tensors of words, each one run without gaps.
    turns: int32[2], zero before and after.
    """
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    HALVES: tl.constexpr = ITEM == 2
    turn = tl.program_id(0)
    while turn < chunks:
        following = draw_chunk(turns)
        address, offset, rows, length, _, _, tensor = find_chunk(segments, owners, turn)
        address += offset * ITEM
        head, words, tail = split_run(address, rows, length, ITEM, 4)
        data = tl.multiple_of((address + head * ITEM).to(tl.pointer_type(tl.int32)), 16)
        k = offset.to(tl.uint64)
        first = k + head.to(tl.uint64)
        total = tl.zeros([TILE], tl.uint64)
        if HALVES:
            if (first & 1) == 0:
                total = _add_run(total, data, words, first, True, HALVES, TILE, AHEAD)
            else:
                total = _add_run(total, data, words, first, False, HALVES, TILE, AHEAD)
        else:
            total = _add_run(total, data, words, first, True, HALVES, TILE, AHEAD)
        if head + tail > 0:
            total = _add_ends(total, address, length, head, tail, k, DTYPE, TILE)
        amount = tl.sum(total.to(tl.int64, bitcast=True), 0)
        tl.atomic_add(digests + tensor, amount, sem="relaxed")
        turn = following
    is_last_program(turns)
