"""One pass for p = inf, -inf and 0: largest, smallest magnitude, and the number of non-zeros.

Magnitudes of IEEE numbers compare as integers. Two 16-bit elements a word are compared by whole
words: the upper half decides there, so only the lower one is cut out.
"""

import triton
import triton.language as tl

from .chunks import draw_chunk, find_chunk
from .finish import COUNT, MIN, finish_if_last
from .limbs import (
    BASE,
    EXTREME,
    NAN,
    NEGATIVE_INFINITY,
    POSITIVE_INFINITY,
    STRIPES,
    SUMS_LENGTH,
    count,
)
from .walk import gather, load_ends, split_run
from .words import infinity_bits, magnitudes, widen


@triton.jit
def _keys(word, DTYPE: tl.constexpr, KIND: tl.constexpr):
    """What is to be maximised: magnitudes, or for the smallest one their complements."""
    word = magnitudes(word, DTYPE)
    return word ^ magnitudes(~(word & 0), DTYPE) if KIND == MIN else word


@triton.jit
def _add(best, other, keys, DTYPE: tl.constexpr, KIND: tl.constexpr):
    """Takes keys into the accumulators: two of a word's halves, or one."""
    PAIRS: tl.constexpr = DTYPE == tl.bfloat16 or DTYPE == tl.float16
    if KIND == COUNT and PAIRS:
        best += ((keys + 0x7FFF7FFF) >> 15) & 0x00010001
    elif KIND == COUNT:
        best += (keys != 0).to(best.dtype)
    else:
        best = tl.maximum(best, keys)
        if PAIRS:
            other = tl.maximum(other, keys & 0xFFFF)
    return best, other


@triton.jit
def _note_infinite(flags, word, DTYPE: tl.constexpr):
    """Sets the top bit of a half where it is no finite number, by a carry."""
    infinite = infinity_bits(DTYPE)
    if DTYPE == tl.float64:
        large = magnitudes(word, DTYPE) + (0x7FFFFFFFFFFFFFFF - infinite + 1)
        return flags | (large >> 32).to(tl.int32)
    elif DTYPE == tl.float32:
        return flags | (magnitudes(word, DTYPE) + (0x7FFFFFFF - infinite + 1))
    else:
        return flags | (magnitudes(word, DTYPE) + (0x8000 - infinite) * 0x10001)


@triton.jit
def _count_infinite(limbs, address, rows, row_length, row_stride, weight, best,
                    DTYPE: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Counts what is not finite, and takes the best key again, without NaN."""
    infinite = infinity_bits(DTYPE)
    lanes = tl.arange(0, TILE)
    nan = tl.zeros([TILE], tl.int32)
    positive = tl.zeros([TILE], tl.int32)
    negative = tl.zeros([TILE], tl.int32)
    keys = tl.zeros([TILE], best.dtype) - 1
    elements = (rows * row_length).to(tl.int32)
    for start in range(0, elements, TILE):
        index = start + lanes
        word = gather(address, index, elements, row_length, row_stride, DTYPE)
        bits = magnitudes(word, DTYPE)
        nan += (bits > infinite).to(tl.int32)
        positive += ((bits == infinite) & (bits == word)).to(tl.int32)
        negative += ((bits == infinite) & (bits != word)).to(tl.int32)
        is_number = (bits <= infinite) & (index < elements)
        keys = tl.maximum(keys, tl.where(is_number, _single(_keys(word, DTYPE, KIND), DTYPE), -1))
    count(limbs + NAN, tl.sum(nan, 0), weight)
    count(limbs + POSITIVE_INFINITY, tl.sum(positive, 0), weight)
    count(limbs + NEGATIVE_INFINITY, tl.sum(negative, 0), weight)
    return tl.max(keys, 0) if KIND != COUNT else best


@triton.jit
def _single(keys, DTYPE: tl.constexpr):
    """Keys of words that hold one element."""
    return keys & 0xFFFF if DTYPE == tl.bfloat16 or DTYPE == tl.float16 else keys


@triton.jit
def _read(
    address, rows, row_length, row_stride, DTYPE: tl.constexpr, KIND: tl.constexpr,
    TILE: tl.constexpr, AHEAD: tl.constexpr, WORD: tl.constexpr, ITEM: tl.constexpr,
):  # fmt: skip
    """The chunk's best key or count, and whether any element is not finite."""
    INT: tl.constexpr = tl.int64 if WORD == 8 else tl.int32
    lanes = tl.arange(0, TILE)
    best = tl.zeros([TILE], INT)
    other = tl.zeros([TILE], INT)
    flags = tl.zeros([TILE], tl.int32)
    head, words, tail = split_run(address, rows, row_length, ITEM, WORD)
    data = tl.multiple_of((address + head * ITEM).to(tl.pointer_type(INT)), 16)
    STEP: tl.constexpr = AHEAD * TILE
    whole = words // STEP * STEP
    for start in range(0, whole, STEP):
        tiles = ()
        for tile in tl.static_range(AHEAD):
            tiles = tiles + (tl.load(data + start + tile * TILE + lanes),)
        for tile in tl.static_range(AHEAD):
            flags = _note_infinite(flags, tiles[tile], DTYPE)
            best, other = _add(best, other, _keys(tiles[tile], DTYPE, KIND), DTYPE, KIND)
    for start in range(whole, words, TILE):
        inside = start + lanes < words
        word = tl.load(data + start + lanes, mask=inside, other=0)
        flags = _note_infinite(flags, word, DTYPE)
        keys = tl.where(inside, _keys(word, DTYPE, KIND), 0)
        best, other = _add(best, other, keys, DTYPE, KIND)
    if head + tail > 0:
        word = load_ends(address, row_length, head, tail, DTYPE, TILE)
        flags = _note_infinite(flags, word, DTYPE)
        keys = tl.where(lanes < head + tail, _single(_keys(word, DTYPE, KIND), DTYPE), 0)
        best, other = _add(best, other, keys, DTYPE, KIND)
    scattered = tl.where(rows == 1, 0, rows * row_length).to(tl.int32)
    for start in range(0, scattered, TILE):
        word = gather(address, start + lanes, scattered, row_length, row_stride, DTYPE)
        flags = _note_infinite(flags, word, DTYPE)
        keys = tl.where(start + lanes < scattered, _single(_keys(word, DTYPE, KIND), DTYPE), 0)
        best, other = _add(best, other, keys, DTYPE, KIND)
    if DTYPE == tl.bfloat16 or DTYPE == tl.float16:
        flags = flags & -2147450880  # 0x80008000
        if KIND == COUNT:
            result = tl.sum((best & 0xFFFF) + (best >> 16), 0)
        else:
            result = tl.max(tl.maximum(best >> 16, other), 0)
    else:
        flags = flags & -2147483648
        result = tl.sum(best, 0) if KIND == COUNT else tl.max(best, 0)
    return result, tl.max((flags != 0).to(tl.int32), 0) != 0


@triton.jit
def _extreme_key(best, DTYPE: tl.constexpr, KIND: tl.constexpr):
    """The key of the finish: float64 bits of the magnitude, complemented for the smallest."""
    if KIND == MIN:
        best = _single(_keys(best, DTYPE, KIND), DTYPE)  # complemented twice: the magnitude
    bits = widen(best, DTYPE).to(tl.int64, bitcast=True)
    return ~bits if KIND == MIN else bits


@triton.jit
def extremes(
    segments, owners, stripes, details, turns, scratch, output, result,
    chunks, then, max_norm, eps, loss_scale,
    KIND: tl.constexpr, DTYPE: tl.constexpr, TILE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Takes the extreme magnitude, or counts non-zeros; arguments as in `sums.sums`."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    WORD: tl.constexpr = 8 if ITEM == 8 else 4
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
        best, is_odd = _read(
            address, rows, row_length, row_stride, DTYPE, KIND, TILE, AHEAD, WORD, ITEM
        )
        if is_odd:
            best = _count_infinite(
                target, address, rows, row_length, row_stride, weight, best, DTYPE, KIND, TILE
            )
        if KIND == COUNT:
            count(target + -BASE // 32, best, weight)
        elif best >= 0:  # something but NaN
            key = _extreme_key(best, DTYPE, KIND) ^ -9223372036854775808
            place = (target + EXTREME).to(tl.pointer_type(tl.uint64))
            tl.atomic_max(place, key.to(tl.uint64, bitcast=True), sem="relaxed")
        number = following
    finish_if_last(
        stripes, turns, scratch, output, result, then, max_norm, eps, loss_scale,
        eps * 0.0, KIND,
    )  # fmt: skip
