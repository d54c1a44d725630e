"""Sparse COO gradients: an index listed twice counts as its sum, an index not listed is a zero.

The values of an index that is listed more than once are added exactly and rounded once to float64,
so the order of the list cannot change a bit, and what cancels leaves nothing.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from gradclip.rounding import narrowed

from .exact_sums import sums_by_row
from .slices import SLICE_ELEMENTS


class Block(NamedTuple):
    """Values of all distinct indices in some of the dense columns."""

    keys: torch.Tensor
    """Row-major places of the indices among the sparse dimensions: int64[n]."""
    start: int
    """The first column."""
    values: torch.Tensor
    """[n, columns]: the tensor's type, or float64 (complex128) where an index may be repeated."""


def blocks(tensor: torch.Tensor) -> Iterator[Block]:
    """Blocks that together hold each listed element once.

    Temporaries grow with the number of listed indices, as the indices themselves do, not with the
    values.
    """
    keys = _keys(tensor)
    listed = tensor._values()
    columns = listed.reshape(len(listed), math.prod(listed.shape[1:]))
    merged, rows = keys, None
    if not tensor.is_coalesced():
        merged, rows = torch.unique(keys, return_inverse=True)
    width = max(1, SLICE_ELEMENTS // max(1, len(keys)))
    for start in range(0, columns.shape[1], width):
        block = columns[:, start : start + width]
        values = block if rows is None else _merged(block, rows, len(merged))
        yield Block(merged, start, values)


def owned_values(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """The listed values among the row-major elements [start, stop); waits for the device."""
    columns = math.prod(tensor._values().shape[1:])
    for block in blocks(tensor):
        column = torch.arange(block.values.shape[1], device=tensor.device) + block.start
        place = (block.keys * columns).unsqueeze(1) + column
        yield block.values[(place >= start) & (place < stop)]


def coalesced(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with every index once; its values are the exact sums, rounded to float64 first."""
    parts = list(blocks(tensor))
    keys = rows = parts[0].keys if parts else _keys(tensor)[:0]
    indices = []
    for size in reversed(tensor.shape[: tensor.sparse_dim()]):
        indices.append(keys % size)
        keys = keys // size
    rows = torch.stack(indices[::-1]) if indices else tensor._indices()[:, : len(rows)]
    shape = (rows.shape[1], *tensor.shape[tensor.sparse_dim() :])
    values = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    for block in parts:
        columns = values.view(shape[0], -1)[:, block.start : block.start + block.values.shape[1]]
        columns.copy_(narrowed(block.values, tensor.dtype))
    return torch.sparse_coo_tensor(
        rows,
        values,
        tensor.shape,
        device=tensor.device,
        is_coalesced=True,
        check_invariants=False,
    )


def _keys(tensor: torch.Tensor) -> torch.Tensor:
    keys = torch.zeros(tensor._nnz(), dtype=torch.int64, device=tensor.device)
    for size, index in zip(tensor.shape, tensor._indices(), strict=False):
        keys = keys * size + index
    return keys


def _merged(block: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    if block.dtype == torch.complex32:
        block = block.to(torch.complex64)
    if not block.is_complex():
        return sums_by_row(_wide(block), rows, count)
    parts = torch.view_as_real(block.resolve_conj()).flatten(1)
    merged = sums_by_row(_wide(parts), rows, count)
    return torch.view_as_complex(merged.reshape(count, block.shape[1], 2))


def _wide(block: torch.Tensor) -> torch.Tensor:
    return block if block.dtype == torch.float64 else block.to(torch.float32).to(torch.float64)
