"""Launches the kernels as the engine does, over tensors in main memory."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels run on the CPU with TRITON_INTERPRET=1", allow_module_level=True)

from kernels.entries import ENTRIES
from kernels.finish import FINISH as FINISH
from kernels.finish import NOTHING as NOTHING
from kernels.limbs import STRIPES, SUMS_LENGTH

DTYPES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}
NONE = -(1 << 63)
_BY_NAME = {entry.name: entry for entry in ENTRIES}


@dataclass
class Segment:
    """Rows of a tensor: where they are, and how often each element counts."""

    address: int
    rows: int
    row_length: int
    row_stride: int
    weight: int = 1
    tensor: int = 0


def segment(tensor: torch.Tensor, number: int = 0, weight: int = 1) -> Segment:
    """The segment of a dense tensor, or of a matrix whose rows are dense."""
    rows, length, stride = 1, tensor.numel(), tensor.numel()
    if not tensor.is_contiguous():
        rows, length, stride = tensor.shape[0], tensor.shape[1], tensor.stride(0)
    return Segment(tensor.data_ptr(), rows, length, stride, weight, number)


def work_list(segments: Sequence[Segment], chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The segments' table and the owner of each chunk, as kernels/chunks.py wants them."""
    table: list[list[int]] = []
    owners: list[int] = []
    for part in segments:
        if part.rows * part.row_length == 0:
            continue
        piece = min(part.row_length, chunk)
        pieces = -(-part.row_length // piece)
        rows = min(max(chunk // piece, 1), part.rows) if pieces == 1 else 1
        shape = [part.address, part.rows, part.row_length, part.row_stride, part.weight]
        table.append([*shape, part.tensor, len(owners), rows, pieces, piece])
        owners += [len(table) - 1] * (-(-part.rows // rows) * pieces)
    return torch.tensor(table, dtype=torch.int64), torch.tensor(owners, dtype=torch.int32)


class Workspace:
    """What outlives a call: zero before it, and must be zero after it."""

    def __init__(self) -> None:
        self.stripes = torch.zeros(STRIPES.value * SUMS_LENGTH.value, dtype=torch.int64)
        self.turns = torch.zeros(2, dtype=torch.int32)
        self.scratch = torch.full((256,), 0x5555, dtype=torch.int64)
        self.output = torch.full((SUMS_LENGTH.value,), 0x5555, dtype=torch.int64)
        self.result = torch.full((4,), torch.nan, dtype=torch.float64)

    def is_clean(self) -> bool:
        """Whether the next call finds what it needs."""
        return not self.stripes.any() and not self.turns.any()

    @property
    def total(self) -> float:
        """The total norm of the last finish."""
        return float(self.result[0])

    @property
    def coefficient(self) -> float:
        """The clip coefficient of the last finish."""
        return float(self.result[1])


def run(name: str, grid: int, arguments: Sequence[Any]) -> None:
    """Interprets an entry with the constants that it is compiled with."""
    entry = _BY_NAME[name]
    entry.kernel[(grid,)](*arguments, **entry.constants)


def sums(
    kind: str,
    dtype: torch.dtype,
    segments: Sequence[Segment],
    *,
    chunk: int | None = None,
    grid: int = 3,
    then: int = FINISH.value,
    details: torch.Tensor | int = 0,
    max_norm: float = 1.0,
    eps: float = 1e-6,
    loss_scale: float = 1.0,
    workspace: Workspace | None = None,
) -> Workspace:
    """One launch of `sums_1`, `sums_2`, `sums_3`, `count`, `max` or `min` for a dtype."""
    name = f"{kind}_{DTYPES[dtype]}"
    space = workspace or Workspace()
    table, owners = work_list(segments, chunk or _BY_NAME[name].chunk)
    clip = (len(owners), then, max_norm, eps, loss_scale)
    space_pointers = (space.stripes, details, space.turns, space.scratch, space.output)
    run(name, grid, (table, owners, *space_pointers, space.result, *clip))
    assert space.is_clean() or then == NOTHING.value
    return space


def powers(
    dtype: torch.dtype,
    segments: Sequence[Segment],
    kind: int,
    p: float,
    *,
    exponent: int = 0,
    divisor: float = 0.0,
    chunk: int = 4096,
) -> Workspace:
    """One launch of `powers` for a dtype, collected."""
    space = Workspace()
    table, owners = work_list(segments, chunk)
    pointers = (space.stripes, 0, space.turns, space.scratch, space.output, space.result)
    rest = (len(owners), 1, kind, p, exponent, divisor)
    run(f"powers_{DTYPES[dtype]}", 2, (table, owners, *pointers, *rest))
    assert space.is_clean()
    return space
