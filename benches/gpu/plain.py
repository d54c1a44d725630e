"""The ceiling: a float64 sum of squares that reads the same chunks and does nothing else.

Needs Triton at run time, as the comparison alone does: it is no kernel of the wheel.
"""

# ruff: noqa: N803, N806, RUF005 (Triton: constants in capitals, tuples grow by +)
# mypy: disable-error-code="untyped-decorator,assignment"

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradclip.kernels.chunks import find_chunk
from gradclip.kernels.walk import split_run
from gradclip.kernels.words import narrow_upper, widen

CHUNK = 65536
TYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


@triton.jit
def _add(total, word, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    x = widen(word, DTYPE)
    total = tl.fma(x, x, total)
    if tl.bfloat16 == DTYPE or tl.float16 == DTYPE:
        y = narrow_upper(word, DTYPE).to(tl.float64)
        total = tl.fma(y, y, total)
    return total


@triton.jit
def _plain(segments, owners, out, chunks, DTYPE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    WORD: tl.constexpr = 8 if ITEM == 8 else 4
    lanes = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float64)
    for number in range(tl.program_id(0), chunks, tl.num_programs(0)):
        address, offset, rows, length, _, _, _ = find_chunk(segments, owners, number)
        address += offset * ITEM
        head, words, _ = split_run(address, rows, length, ITEM, WORD)
        start = (address + head * ITEM).to(tl.pointer_type(tl.int64 if WORD == 8 else tl.int32))
        start = tl.multiple_of(start, 16)
        whole = words // (4 * TILE) * (4 * TILE)
        for first in range(0, whole, 4 * TILE):
            tiles = ()
            for tile in tl.static_range(4):
                tiles = tiles + (tl.load(start + first + tile * TILE + lanes),)
            for tile in tl.static_range(4):
                total = _add(total, tiles[tile], DTYPE)
        for first in range(whole, words, TILE):
            word = tl.load(start + first + lanes, mask=first + lanes < words, other=0)
            total = _add(total, word, DTYPE)
    tl.atomic_add(out, tl.sum(total, 0))


def plain_pass(tensors: list[Tensor], programs: int) -> Callable[[], object]:
    """A call that launches the plain pass over tensors of one dtype."""
    segments: list[list[int]] = []
    owners: list[int] = []
    for tensor in tensors:
        size = tensor.numel()
        piece = min(size, CHUNK)
        pieces = -(-size // piece)
        segments.append([tensor.data_ptr(), 1, size, size, 1, 0, len(owners), 1, pieces, piece])
        owners += [len(segments) - 1] * pieces
    device = tensors[0].device
    table = torch.tensor(segments, dtype=torch.int64, device=device)
    owner = torch.tensor(owners, dtype=torch.int32, device=device)
    out = torch.zeros(1, dtype=torch.float64, device=device)
    dtype = TYPES[tensors[0].dtype]
    tile = 64 if dtype == tl.float64 else 128
    grid = (torch.cuda.get_device_properties(device).multi_processor_count * programs,)
    return lambda: _plain[grid](
        table, owner, out, len(owners), DTYPE=dtype, TILE=tile, num_warps=1, enable_fp_fusion=False
    )
