"""The clip over ranks on a device: nothing waits for the host, which reads the verdict later.

The device itself judges the reduced tail. A bad one makes the factor 1, so that no gradient
changes, and the host raises when it next looks: at the next clip, or when asked. A rank that fails
on its own host raises at once; it still sends its vector, so that nobody hangs.

A call may be deferred when the host has nothing to find out: every layout was seen before, copies
were compared, sums need no second pass, and non-finite totals are not to be raised.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from gradclip import engine
from gradclip.cuda import CudaEngine
from gradclip.gradients import Gradients
from gradclip.sharding import agreement

if TYPE_CHECKING:
    from gradclip.sharding.contribution import Contribution

_KEPT_JUDGES = 64


class DeviceEngine(Protocol):
    """This rank's gradients on one device, summed and scaled without the host."""

    def sums(self, norm_type: float) -> torch.Tensor:
        """The sums of everything that counts here: int64[144] on the device."""

    def finish(
        self, sums: torch.Tensor, norm_type: float, max_norm: float, eps: float, loss_scale: float
    ) -> torch.Tensor:
        """From summed sums (carries not propagated) to float64[4].

        The total of the unscaled gradients, the coefficient, what gradients are multiplied by, and
        the total once more as float32.
        """

    def scale_(self, factor: torch.Tensor) -> None:
        """Multiply all gradients by a 0-dim float64 tensor that the host does not read."""


def engine_for(gradients: Gradients, device: torch.device) -> DeviceEngine | None:
    """The engine of these gradients, when all of them are on the transport's device; else None."""
    if device.type != "cuda" or gradients.sole_cuda != device.index:
        return None
    return _Cuda(gradients, gradients.sole_cuda)


class _Cuda(CudaEngine):
    def __init__(self, gradients: Gradients, device: int) -> None:
        super().__init__(gradients.core, device)
        self.gradients = gradients

    def scale_(self, factor: torch.Tensor) -> None:
        super().scale_(factor)
        engine.written(self.gradients)


@dataclass
class Pending:
    """A verdict on its way to the host."""

    tail: torch.Tensor
    maximum: bool
    event: torch.cuda.Event | None

    def read(self) -> agreement.Verdict:
        """The verdict; waits for the device to reach it."""
        if self.event is not None:
            self.event.synchronize()
        return agreement.read(self.tail.tolist(), self.maximum)


class Judge:
    """The tail that this rank sends and expects, kept on the device between calls."""

    def __init__(
        self, tail: agreement.Tail, ranks: int, maximum: bool, device: torch.device
    ) -> None:
        good, fixed = agreement.expected(tail, ranks, maximum)
        rows = [tail.words(maximum), good, fixed]
        pinned = device.type == "cuda"
        words = torch.tensor(rows, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self.sent, self.good, self.fixed = words.to(device, non_blocking=True)
        self.maximum = maximum

    def vector(self, sums: torch.Tensor) -> torch.Tensor:
        """The vector to reduce."""
        vector = torch.cat([sums, self.sent])
        if not self.maximum:
            vector[agreement.EXTREME].fill_(0)  # `= 0` would copy from the host
        return vector

    def is_bad(self, sums: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
        """A 0-dim boolean: whether a rank failed, ranks differ, or more rounds would follow."""
        plain = tail[agreement.PLAIN_REPLICAS] * tail[agreement.PLAIN_SHARDS]
        remainders = tail[agreement.BALANCES :].remainder(agreement.BALANCE).view(4, 2).any(dim=1)
        outline, pending, content, compared = remainders
        differs = ((tail - self.good) * self.fixed).any()
        content_differs = torch.logical_and(content, compared.logical_not())
        bad = torch.logical_or(outline, pending).logical_or(content_differs).logical_or(differs)
        return bad.logical_or(plain != 0).logical_or(sums[agreement.OUT_OF_RANGE] != 0)


class Deferred:
    """What one session keeps between its deferred calls.

    `waits` says that the host reads the next verdict itself: at the first call, which finds out
    about dtypes, and after it raised, to hear of the others, who tell of the failure then. `double`
    is what the last such call found: whether any rank has float64 gradients.
    """

    def __init__(self) -> None:
        self.waits = True
        self.judges: dict[tuple[int, ...], Judge] = {}
        self.captured: list[Judge] = []
        self.pending: Pending | None = None
        self.double = False

    def earlier(self) -> agreement.Verdict | None:
        """What the last deferred call came to, once; None when there is nothing to tell."""
        pending, self.pending = self.pending, None
        return None if pending is None else pending.read()

    def clip_(self, engine: DeviceEngine, mine: Contribution) -> torch.Tensor:
        """Clip; float64[4] as `DeviceEngine.finish` gives.

        While a CUDA graph is captured there is no verdict to keep: its replays judge on the device.
        """
        asked, transport = mine.request.settings, mine.plan.transport
        judge = self._judge(mine, transport.device)
        vector = judge.vector(engine.sums(asked.norm_type))
        reduced = transport.max_(vector) if judge.maximum else transport.sum_(vector)
        sums, tail = agreement.split(reduced, judge.maximum)
        bad = judge.is_bad(sums[0], tail)
        result = engine.finish(sums[0], asked.norm_type, asked.max_norm, asked.eps, asked.scale)
        engine.scale_(torch.where(bad, torch.ones_like(result[2]), result[2]))
        self.pending = _on_its_way(tail, judge.maximum)
        return result

    def _judge(self, mine: Contribution, device: torch.device) -> Judge:
        tail, maximum = replace(mine.tail, deferred=True), mine.request.maximum
        key = (int(maximum), *tail.words(maximum))
        if key in self.judges:
            return self.judges[key]
        transport = mine.plan.transport
        ranks = 1 if transport.is_dry else len(transport.ranks)
        judge = Judge(tail, ranks, maximum, device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.captured.append(judge)
            return judge
        if len(self.judges) >= _KEPT_JUDGES:
            self.judges.clear()
        self.judges[key] = judge
        return judge


def _on_its_way(tail: torch.Tensor, maximum: bool) -> Pending | None:
    if tail.device.type != "cuda":
        return Pending(tail.clone(), maximum, None)
    if torch.cuda.is_current_stream_capturing():
        return None
    host = torch.empty(tail.shape, dtype=tail.dtype, device="cpu", pin_memory=True)
    host.copy_(tail, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return Pending(host, maximum, event)
