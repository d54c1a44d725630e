"""Time on the device, on the host and in all; launches; memory."""

import os
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], object]
HEAD_START = 20_000_000
"""Cycles that the device is kept busy before a call, so that no launch waits for the host."""


def device_ms(call: Call, rounds: int = 7) -> float:
    """Median milliseconds that the device works on a call."""
    return in_turns({"": call}, _device_ms, rounds)[""]


def device_ms_of(calls: dict[str, Call]) -> dict[str, float]:
    """`device_ms` of each call, in turns: what slows the device for a while slows all of them."""
    return in_turns(calls, _device_ms, 11)


def wall_ms_of(calls: dict[str, Call]) -> dict[str, float]:
    """Median milliseconds from a call until the device has done it, in turns."""
    return in_turns(calls, _wall_ms, 9)


def in_turns(
    calls: dict[str, Call], clock: Callable[[Call], float], rounds: int
) -> dict[str, float]:
    """The median of what a clock shows for each call, after one call that does not count."""
    for call in calls.values():
        call()
    times = [{name: clock(call) for name, call in calls.items()} for _ in range(rounds)]
    return {name: median(turn[name] for turn in times) for name in calls}


def _device_ms(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(HEAD_START)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def _wall_ms(call: Call) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def host_us(call: Call) -> float:
    """Microseconds of a call in a row of its kind, the device far behind.

    The best of a row on each core, since neighbours on the machine only add.
    """
    return 1e6 * min(_row_seconds(call) for _ in each_core())


def first_host_us(call: Call) -> float:
    """Median microseconds of a call after the host waited: its caches hold little of the list."""
    times = []
    for _ in range(25):
        torch.cuda.synchronize()
        times.append(_seconds(call, 1))
    return 1e6 * median(times)


def _row_seconds(call: Call) -> float:
    """Seconds of a call among a hundred; those before it brought the list into the caches."""
    torch.cuda.synchronize()
    _seconds(call, 10)
    return _seconds(call, 100) / 100


def _seconds(call: Call, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - start


def each_core() -> Iterator[None]:
    """Stays on each core in turn; a few rounds anywhere where there is no choice."""
    if not hasattr(os, "sched_setaffinity"):
        yield from (None for _ in range(9))
        return
    allowed = os.sched_getaffinity(0)
    try:
        for core in sorted(allowed):
            os.sched_setaffinity(0, {core})
            yield
    finally:
        os.sched_setaffinity(0, allowed)


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
