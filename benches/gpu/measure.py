"""Time on the device, on the host and in all; launches; memory."""

import os
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], object]
HEAD_START = 20_000_000
"""Cycles that the device is kept busy before a call, so that no launch waits for the host."""


def device_ms(call: Call, rounds: int = 7) -> float:
    """Median milliseconds that the device works on a call."""
    call()
    times: list[float] = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(HEAD_START)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


def wall_ms(call: Call, rounds: int = 9) -> float:
    """Median milliseconds from the call until the device has done it."""
    call()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * median(times)


def host_us(call: Call) -> float:
    """Microseconds of a call in a row of its kind, the device far behind.

    The best of several rows, since neighbours on the machine only add; rows so long that the first
    call, whose caches are cold (`first_host_us`), weighs little.
    """
    return 1e6 * min(_host_seconds(call, calls=100, rounds=9))


def first_host_us(call: Call) -> float:
    """Median microseconds of a call after the host waited: its caches hold little of the list."""
    return 1e6 * median(_host_seconds(call, calls=1, rounds=25))


def _host_seconds(call: Call, calls: int, rounds: int) -> list[float]:
    call()
    times = []
    with quietest_core():
        for _ in range(rounds):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            times.append((time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return times


@contextmanager
def quietest_core() -> Iterator[None]:
    """Stays on the core that is quickest now: neighbours on a shared one double the time."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed, key=_loop_seconds)})
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def _loop_seconds(core: int) -> float:
    os.sched_setaffinity(0, {core})
    return median(timeit.repeat("sum(range(10_000))", number=1, repeat=9))


def launches(call: Call) -> int:
    """Kernels that a call launches."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    on_device = [e for e in seen.events() if e.device_type.name == "CUDA"]
    return sum(not event.name.startswith("Mem") for event in on_device)


def extra_bytes(call: Call) -> int:
    """Peak device memory that a call takes beyond what was in use."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
