"""What is measured of one sharded model: bits, calls, times, memory, failure, capture."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import gradclip

REPEATS = 20
NOTHING_TO_CLIP = 1e9
SHRINK = 0.9  # each active clip asks for a norm below the one before

Named = list[tuple[str, nn.Parameter]]


class Subject:
    """One sharded model with gradients, the device of its group, and its clipper."""

    def __init__(self, named: Named, device: torch.device) -> None:
        self.named = named
        self.device = device
        self.clipper = gradclip.Clipper(named, NOTHING_TO_CLIP, dtype=torch.float64)
        self.parameters = [parameter for _, parameter in named]

    def local(self) -> list[torch.Tensor]:
        """The local gradients."""
        return [local_of(parameter) for parameter in self.parameters]

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def local_of(parameter: nn.Parameter) -> torch.Tensor:
    """The local gradient of a parameter."""
    gradient: Any = parameter.grad
    found: torch.Tensor = getattr(gradient, "_local_tensor", gradient)
    return found


def bits(subject: Subject, expected: float) -> str:
    """Whether the total is the one-device exact norm, bit for bit."""
    total = subject.clipper.clip_().item()
    return "equal" if total == expected else f"DIFFER: {total!r} for {expected!r}"


def collectives(subject: Subject) -> str:
    """Collectives of one clip that the profiler saw: kernels of NCCL, or calls of gloo."""
    cuda = subject.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    subject.clipper.clip_()
    subject.synchronize()
    with profile(activities=activities) as profiler:
        subject.clipper.clip_()
        subject.synchronize()
    prefix = "nccldevkernel" if cuda else "gloo:"
    names = [event.name for event in profiler.events()]
    return str(sum(name.lower().startswith(prefix) for name in names))


def clip_time(subject: Subject, active: bool) -> float:
    """Milliseconds of one clip of gradclip, until the device is done."""
    limit = _limits(subject, active)

    def clip() -> object:
        subject.clipper.max_norm = limit()
        return subject.clipper.clip_()

    return _median(subject, clip)


def torch_time(subject: Subject, active: bool) -> float | str:
    """The same of torch's `clip_grad_norm_`; where it fails, why."""
    limit = _limits(subject, active)
    call = lambda: torch.nn.utils.clip_grad_norm_(subject.parameters, limit())  # noqa: E731
    try:
        return _median(subject, call)
    except Exception as error:
        return f"fails: {type(error).__name__}"


def read_time(subject: Subject) -> float:
    """Milliseconds of `torch._foreach_norm` over the local gradients: plain reads, no ranks."""
    tensors = [t for t in subject.local() if t.numel()]
    return _median(subject, lambda: torch._foreach_norm(tensors))


def host_time(subject: Subject) -> float:
    """Milliseconds until a clip returns, the device idle before and not waited for."""
    subject.clipper.max_norm = NOTHING_TO_CLIP
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        subject.synchronize()
        start = time.perf_counter()
        subject.clipper.clip_()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def extra_memory(subject: Subject) -> str:
    """KiB that the device's allocator held at most beyond what it held before."""
    if subject.device.type != "cuda":
        return "-"
    subject.clipper.clip_()
    subject.synchronize()
    torch.cuda.reset_peak_memory_stats(subject.device)
    before = torch.cuda.memory_allocated(subject.device)
    subject.clipper.clip_()
    subject.synchronize()
    return f"{(torch.cuda.max_memory_allocated(subject.device) - before) / 1024:.0f}"


def nan_on_one_rank(subject: Subject) -> str:
    """A NaN that the last rank counts: all raise, no gradient changes; then a good step."""
    victim, place = _counted_element(subject)
    kept = victim[place].clone()
    if dist.get_rank() == dist.get_world_size() - 1:
        victim[place] = math.nan
    before = [tensor[:1].clone() for tensor in _flat(subject.local())]
    guard = gradclip.Clipper(
        subject.named, 1e-3, error_if_nonfinite=True, check_replicas=False, dtype=torch.float64
    )
    try:
        guard.clip_()
    except RuntimeError as error:
        raised = "non-finite" in str(error)
    else:
        raised = False
    same = all(
        torch.equal(was.nan_to_num(9.0), now[:1].nan_to_num(9.0))
        for was, now in zip(before, _flat(subject.local()), strict=True)
    )
    victim[place] = kept
    good = math.isfinite(subject.clipper.clip_().item())
    return _on_all_ranks(raised and same and good, subject.device)


def _counted_element(subject: Subject) -> tuple[torch.Tensor, int]:
    """A flat local gradient and the place of an element in it that this rank counts."""
    for (_, parameter), share in zip(
        subject.named, gradclip.explain(subject.named).shares, strict=True
    ):
        start, stop = map(int, share.counted.split(" ")[0].split(":"))
        if stop > start:
            return local_of(parameter).view(-1), start
    raise AssertionError("this rank counts nothing")


def capture(subject: Subject) -> str:
    """The whole clip, collective inside, captured in a CUDA graph and replayed."""
    if subject.device.type != "cuda":
        return "-"
    subject.clipper.max_norm = NOTHING_TO_CLIP
    subject.clipper.clip_()  # the host reads the verdict of the first call, and of none after it
    expected = subject.clipper.clip_().item()
    graph = torch.cuda.CUDAGraph()
    try:
        # the watchdog of NCCL asks for events from its own thread meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            total = subject.clipper.clip_()
    except Exception as error:
        return f"fails: {type(error).__name__}: {str(error)[:60]}"
    for _ in range(3):
        graph.replay()
    subject.synchronize()
    return _on_all_ranks(total.item() == expected, subject.device)


def _limits(subject: Subject, active: bool) -> Callable[[], float]:
    """Limits that fall, so that every call finds something to clip; or one that never bites."""
    subject.clipper.max_norm = NOTHING_TO_CLIP
    limit = float(subject.clipper.clip_())

    def following() -> float:
        nonlocal limit
        limit *= SHRINK
        return limit if active else NOTHING_TO_CLIP

    return following


def _median(subject: Subject, call: Callable[[], object]) -> float:
    """Milliseconds of a call that all ranks start together, until the device is done."""
    times = []
    for k in range(REPEATS + 2):
        dist.barrier()
        subject.synchronize()
        start = time.perf_counter()
        call()
        subject.synchronize()
        if k >= 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def _flat(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.reshape(-1) for tensor in tensors]


def _on_all_ranks(good: bool, device: torch.device) -> str:
    count = torch.tensor([int(good)], device=device)
    dist.all_reduce(count)
    size = dist.get_world_size()
    return "ok" if int(count) == size else f"FAILS on {size - int(count)} of {size} ranks"
