"""What kernels need in device memory besides gradients: work lists and a workspace."""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch

from gradclip import _core, rounding

SUMS_LENGTH = 144
EXTREME = 141
"""Place of the extreme key in the sums."""

Space: TypeAlias = tuple[int, int, int, int, int, int]
"""Addresses of stripes, details, turns, scratch, output and result."""

_STRIPES = 16
_SCRATCH = 256
_RESULT_LENGTH = 4
_KEPT_TABLES = 32


class Stream(NamedTuple):
    """The stream that torch works on."""

    device: torch.device
    handle: int
    is_captured: bool
    """Whether a CUDA graph takes down what is queued."""


def current_stream(device: torch.device) -> Stream:
    """The stream that torch works on for a device."""
    return Stream(device, *_core.current_stream(device.index))


class Table:
    """A work list on a device. It is written once, and may be read by any stream after that."""

    def __init__(self, listed: _core.WorkList, stream: Stream) -> None:
        self.listed = listed
        self.dtype = listed.dtype
        self.host = torch.empty(listed.size, dtype=torch.uint8, device="cpu", pin_memory=True)
        listed.write_to(self.host.data_ptr(), self.host.numel())
        self.memory = self.host.to(stream.device, non_blocking=True)
        self.address = self.memory.data_ptr()
        self.stream = stream.handle
        self.written = None
        if not stream.is_captured:
            self.written = torch.cuda.current_stream(stream.device).record_event()

    def use(self, stream: Stream) -> None:
        """Orders a stream after the upload; a captured graph needs the memory for good."""
        if stream.is_captured:
            _captured.add(self)
        elif self.written is not None and self.stream != stream.handle:
            current = torch.cuda.current_stream(stream.device)
            current.wait_event(self.written)
            self.memory.record_stream(current)


_tables: dict[torch.device, OrderedDict[int, Table]] = {}
_tables_lock = threading.Lock()

_captured: set[Table] = set()
"""What CUDA graphs read at every replay, the host's memory too where they do the upload."""


def table_of(listed: _core.WorkList, stream: Stream) -> Table:
    """The work list in device memory: the one uploaded before, if it is the same.

    A CUDA graph that captures a new list captures its upload too.
    """
    with _tables_lock:
        known = _tables.setdefault(stream.device, OrderedDict())
        for key, table in reversed(known.items()):
            if table.listed.same_as(listed):
                known.move_to_end(key)
                return table
        table = Table(listed, stream)
        if not stream.is_captured:
            known[id(listed)] = table
            _forget(known)
        return table


def _forget(known: OrderedDict[int, Table]) -> None:
    """Drops the lists that were used longest ago."""
    while len(known) > _KEPT_TABLES:
        known.popitem(last=False)


class Workspace:
    """Memory that kernels leave as they found it: zeros where they add.

    A `with` block has it alone, and gives it back at its end. When the block fails, a launch may be
    missing whose program would have cleared the sums: then nobody gets this workspace again.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.stripes = torch.zeros(_STRIPES * SUMS_LENGTH, dtype=torch.int64, device=stream.device)
        self._turns = torch.zeros(2, dtype=torch.int32, device=stream.device)
        unread = _SCRATCH + SUMS_LENGTH + _RESULT_LENGTH
        self._unread = torch.empty(unread, dtype=torch.int64, device=stream.device)
        self.turns = self._turns.data_ptr()
        self._zeroed = self.stripes.data_ptr()
        self._scratch = self._unread.data_ptr()
        self._output = self._scratch + _SCRATCH * self._unread.element_size()
        self._result = self._output + SUMS_LENGTH * self._unread.element_size()

    def addresses(self, *, details: int = 0, output: int = 0, result: int = 0) -> Space:
        """What a sum is told of memory; 0 stands for the workspace's own, or for no details."""
        turns, scratch = self.turns, self._scratch
        return self._zeroed, details, turns, scratch, output or self._output, result or self._result

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure is None and not self.stream.is_captured:
            _idle[self.stream] = self


_idle: dict[Stream, Workspace] = {}


def workspace(stream: Stream) -> Workspace:
    """A workspace for launches on a stream, to be used in a `with` block.

    A captured graph gets one of its own, zeroed at each replay.
    """
    return _idle.pop(stream, None) or Workspace(stream)


@lru_cache(maxsize=64)
def rounded(number: float, dtype: str) -> float:
    """A number rounded once to an element type."""
    return rounding.rounded(number, getattr(torch, dtype))
