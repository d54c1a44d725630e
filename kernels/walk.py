"""How a chunk is cut for vector loads, and how its elements are reached one by one."""

import triton
import triton.language as tl

from .words import load_elements


@triton.jit
def split_run(address, rows, row_length, ITEM: tl.constexpr, WORD: tl.constexpr):
    """A single run -> elements before its first 16-byte boundary, whole words, elements left over.

    All three are zero for chunks of several rows, which are gathered.
    """
    length = tl.where(rows == 1, row_length, 0).to(tl.int32)
    head = tl.minimum(((16 - (address & 15)) & 15).to(tl.int32) // ITEM, length)
    words = (length - head) // (WORD // ITEM)
    return head, words, length - head - words * (WORD // ITEM)


@triton.jit
def load_ends(address, row_length, head, tail, DTYPE: tl.constexpr, TILE: tl.constexpr):
    """The elements of a run before and after its whole words; zero in the lanes left over."""
    lanes = tl.arange(0, TILE)
    last = row_length.to(tl.int32) - tail - head
    offsets = tl.where(lanes < head, lanes, last + lanes)
    return load_elements(address, offsets, lanes < head + tail, DTYPE)


@triton.jit
def gather(address, index, count, row_length, row_stride, DTYPE: tl.constexpr):
    """Elements `index` (below `count`) of a chunk, counted along its rows."""
    row = index // row_length.to(tl.int32)
    column = index - row * row_length.to(tl.int32)
    return load_elements(address, row.to(tl.int64) * row_stride + column, index < count, DTYPE)
