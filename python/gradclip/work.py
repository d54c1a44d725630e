"""What kernels need in device memory besides gradients: work lists and a workspace."""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import cache

import torch
from torch import Tensor

from gradclip import _core

SUMS_LENGTH = 144
EXTREME = 141
"""Place of the extreme key in the sums."""

_STRIPES = 16
_SCRATCH = 256
_KEPT_TABLES = 32


class Table:
    """A work list on a device. It is written once, and may be read by any stream after that."""

    def __init__(self, device: torch.device, listed: _core.WorkList) -> None:
        self.listed = listed
        self.dtype = listed.dtype
        self.chunks = listed.chunks
        self.host = torch.empty(listed.size, dtype=torch.uint8, pin_memory=True)
        listed.write_to(self.host.data_ptr(), self.host.numel())
        self.memory = self.host.to(device, non_blocking=True)
        self.segments = self.memory.data_ptr()
        self.owners = self.segments + listed.owners_offset
        self.captured = torch.cuda.is_current_stream_capturing()
        self.stream = _core.current_stream(device.index)
        stream = torch.cuda.current_stream(device)
        self.written = None if self.captured else stream.record_event()

    def use(self, device: torch.device) -> None:
        """Orders the current stream after the upload."""
        if torch.cuda.is_current_stream_capturing():
            self.captured = True
            return
        if self.written is not None and self.stream != _core.current_stream(device.index):
            stream = torch.cuda.current_stream(device)
            stream.wait_event(self.written)
            self.memory.record_stream(stream)


_tables: dict[torch.device, OrderedDict[int, Table]] = {}
_tables_lock = threading.Lock()

_captured: list[Table] = []
"""Uploads inside of CUDA graphs, which read the host's memory at every replay."""


def table_of(device: torch.device, listed: _core.WorkList) -> Table:
    """The work list in device memory: the one uploaded before, if it is the same.

    A CUDA graph that captures a new list captures its upload too, and both memories stay.
    """
    with _tables_lock:
        return _known_or_uploaded(device, listed)


def _known_or_uploaded(device: torch.device, listed: _core.WorkList) -> Table:
    known = _tables.setdefault(device, OrderedDict())
    for key, table in reversed(known.items()):
        if table.listed is listed or table.listed.same_as(listed):
            known.move_to_end(key)
            table.use(device)
            return table
    if torch.cuda.is_current_stream_capturing():
        _captured.append(table := Table(device, listed))
        return table
    table = known[id(listed)] = Table(device, listed)
    _forget(known)
    return table


def _forget(known: OrderedDict[int, Table]) -> None:
    """Drops the lists that were used longest ago, but none that a captured graph reads."""
    for key in [key for key, table in known.items() if not table.captured][:-_KEPT_TABLES]:
        del known[key]


class Workspace:
    """Memory that kernels leave as they found it: zeros where they add.

    A `with` block has it alone, and gives it back at its end. When the block fails, a launch may be
    missing whose program would have cleared the sums: then nobody gets this workspace again.
    """

    def __init__(self, device: torch.device, key: tuple[torch.device, int] | None) -> None:
        self.key = key
        self.stripes = torch.zeros(_STRIPES * SUMS_LENGTH, dtype=torch.int64, device=device)
        self.turns = torch.zeros(2, dtype=torch.int32, device=device)
        self.scratch = torch.empty(_SCRATCH, dtype=torch.int64, device=device)
        self.output = torch.empty(SUMS_LENGTH, dtype=torch.int64, device=device)
        self.result = torch.empty(4, dtype=torch.float64, device=device)

    def addresses(self, details: int, output: Tensor, result: Tensor) -> tuple[int, ...]:
        """The arguments of a sum from `stripes` to `result`, in the kernels' order."""
        zeroed = self.stripes.data_ptr(), details, self.turns.data_ptr()
        return (*zeroed, self.scratch.data_ptr(), output.data_ptr(), result.data_ptr())

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure is None and self.key is not None:
            _idle[self.key] = self


_idle: dict[tuple[torch.device, int], Workspace] = {}


def workspace(device: torch.device, stream: int) -> Workspace:
    """A workspace for launches on a stream, to be used in a `with` block.

    A captured graph gets one of its own, zeroed at each replay.
    """
    if torch.cuda.is_current_stream_capturing():
        return Workspace(device, None)
    return _idle.pop((device, stream), None) or Workspace(device, (device, stream))


@cache
def rounded(number: float, dtype: str) -> float:
    """A number rounded to an element type."""
    return float(torch.tensor(number, dtype=getattr(torch, dtype)))
