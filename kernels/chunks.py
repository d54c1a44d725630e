"""The work list in device memory: segments, and the chunks that they are cut into.

A segment is a row of SEGMENT_FIELDS int64: address, rows, row length, row stride (elements),
weight, tensor index, number of its first chunk, rows of a chunk, pieces of a row, length of a
piece. `owners` (int32) names the segment of each chunk; where in it the chunk lies is arithmetic,
so the list takes four bytes a chunk.
"""

import triton
import triton.language as tl

SEGMENT_FIELDS = tl.constexpr(10)


@triton.jit
def find_chunk(segments, owners, number):
    """Chunk -> address of its first element is address + ITEM * offset; and its shape.

    Returns (address, offset, rows, row_length, row_stride, weight, tensor), int64.
    """
    segment = segments + tl.load(owners + number).to(tl.int64) * SEGMENT_FIELDS
    address = tl.load(segment)
    all_rows = tl.load(segment + 1)
    whole_row = tl.load(segment + 2)
    row_stride = tl.load(segment + 3)
    weight = tl.load(segment + 4)
    tensor = tl.load(segment + 5)
    local = number - tl.load(segment + 6).to(tl.int32)
    chunk_rows = tl.load(segment + 7)
    pieces = tl.load(segment + 8).to(tl.int32)
    piece_length = tl.load(segment + 9)
    row = (local // pieces).to(tl.int64) * chunk_rows
    column = (local % pieces).to(tl.int64) * piece_length
    rows = tl.minimum(chunk_rows, all_rows - row)
    row_length = tl.minimum(piece_length, whole_row - column)
    return address, row * row_stride + column, rows, row_length, row_stride, weight, tensor


@triton.jit
def draw_chunk(turns):
    """The next chunk that nobody took; programs start with the chunk of their own number.

    Chunks are drawn, not dealt: one that must be redone holds up no others.
    """
    return tl.num_programs(0) + tl.atomic_add(turns, 1, sem="relaxed")


@triton.jit
def is_last_program(turns):
    """Whether this program is the last one to end: all writes are visible then.

    turns: int32[2], chunks drawn and programs done; the last program leaves zeros.
    """
    tl.debug_barrier()  # what the whole program wrote comes before its ticket
    drawn = tl.atomic_add(turns + 1, 1, sem="acq_rel")
    is_last = drawn == tl.num_programs(0) - 1
    if is_last:
        tl.store(turns, 0)
        tl.store(turns + 1, 0)
    return is_last
