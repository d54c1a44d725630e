"""Temporaries do not grow with the gradients: resident memory, torch's and Python's allocations."""

import itertools
import math
import pathlib
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import gradclip
from tests.gradients import gradient_of, parameters

MEGABYTE = 1 << 20
GRADIENTS = 400 * MEGABYTE
PIECE = 20 * MEGABYTE

ENGINE_BOUND = 8 * MEGABYTE
"""Stacks of threads that start, pages of code read for the first time; no gradient's size."""

REFERENCE_BOUND = 64 * MEGABYTE + ENGINE_BOUND

Owners = list[torch.nn.Parameter]

CALLS: dict[str, Callable[[Owners], object]] = {
    "clip_": lambda owners: gradclip.clip_(owners, 1.0),
    "clip_ to the third norm": lambda owners: gradclip.clip_(owners, 1.0, 3.0),
    "clip_ to inf": lambda owners: gradclip.clip_(owners, math.inf, math.inf),
    "get_total_norm": lambda owners: gradclip.get_total_norm(map(gradient_of, owners)),
    "clip_grad_value_": lambda owners: gradclip.clip_grad_value_(owners, 0.5),
    "grad_norms": lambda owners: gradclip.grad_norms(owners),
}


def resident(field: str) -> int:
    """A line of the process's memory statistics, in bytes."""
    lines = pathlib.Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


@contextmanager
def peak_growth() -> Iterator[list[int]]:
    """Measures by how much resident memory grew at its highest inside the block."""
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        pytest.skip("this system does not reset the peak of resident memory")
    growth: list[int] = []
    before = resident("VmRSS")
    yield growth
    growth.append(resident("VmHWM") - before)


def gradients(total_bytes: int, dtype: torch.dtype) -> Owners:
    count = PIECE // torch.empty((), dtype=dtype).element_size()
    return parameters(torch.ones(count).to(dtype) for _ in range(total_bytes // PIECE))


def warm(call: Callable[[Owners], object], dtype: torch.dtype) -> None:
    """Starts threads and loads code, on enough elements for several threads."""
    call(parameters([torch.ones(1 << 20).to(dtype)]))


def test_the_meter_sees_an_allocation() -> None:
    with peak_growth() as growth:
        torch.ones(32 * MEGABYTE // 4)
    assert growth[0] >= 31 * MEGABYTE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_resident_memory_of_a_large_list(dtype: torch.dtype) -> None:
    assert growth_of(CALLS["clip_"], dtype, GRADIENTS) < ENGINE_BOUND


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resident_memory_of_every_call(
    call: Callable[[Owners], object], dtype: torch.dtype
) -> None:
    assert growth_of(call, dtype, GRADIENTS // 4) < ENGINE_BOUND


def growth_of(call: Callable[[Owners], object], dtype: torch.dtype, total_bytes: int) -> int:
    torch.set_num_threads(2)
    warm(call, dtype)
    owners = gradients(total_bytes, dtype)
    with peak_growth() as growth:
        call(owners)
    return growth[0]


def listed(indices: list[int], size: int) -> torch.Tensor:
    values = torch.ones(len(indices), size // 4 // len(indices))
    shape = (max(indices) + 1, values.shape[1])
    return torch.sparse_coo_tensor(torch.tensor([indices]), values, shape, check_invariants=True)


STRANGE: dict[str, Callable[[int], torch.Tensor]] = {
    "strided": lambda size: torch.ones(size // 4).view(64, -1, 32)[:, ::2, ::2],
    "float8": lambda size: torch.ones(size, dtype=torch.float16).to(torch.float8_e5m2),
    "sparse": lambda size: listed([1, 3, 5, 6], size).coalesce(),
    "uncoalesced": lambda size: listed([3, 1, 3, 2], size),
    "conjugated": lambda size: torch.ones(size // 8, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_resident_memory_of_the_reference_path(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADCLIP_FUSED", "0")
    make = STRANGE[kind]
    gradclip.clip_(parameters([make(4 * MEGABYTE)]), 1e-3)
    owners = parameters([make(100 * MEGABYTE)])
    with peak_growth() as growth:
        gradclip.clip_(owners, 1e-3)
    assert growth[0] < REFERENCE_BOUND


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 1.5, math.inf])
def test_slices_of_the_reference_path_stay_below_their_bound(
    p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live bytes are counted at every allocation and release of torch's."""
    monkeypatch.setenv("GRADCLIP_FUSED", "0")
    owners = parameters([torch.ones(2 * MEGABYTE), torch.ones(MEGABYTE, dtype=torch.complex128)])
    assert peak_of_torch(lambda: gradclip.clip_(owners, 1.0, p)) <= 64 * MEGABYTE


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_torchs_allocations(call: Callable[[Owners], object]) -> None:
    owners = gradients(2 * PIECE, torch.float32)
    assert peak_of_torch(lambda: call(owners)) < 4096


def peak_of_torch(call: Callable[[], object]) -> int:
    """The most bytes that torch's CPU allocator held at once during a call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.experimental_event_tree()
    sizes = [size for _, size in sorted(allocations(events))]
    return max(itertools.accumulate(sizes, initial=0))


def allocations(events: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """The times and sizes of all allocations below profiler events; releases are negative."""
    for event in events:
        if event.name == "[memory]":
            yield event.start_time_ns, event.extra_fields.alloc_size
        yield from allocations(event.children)


def test_the_profiler_sees_an_allocation() -> None:
    peak = peak_of_torch(lambda: torch.ones(MEGABYTE) + 1)
    assert 8 * MEGABYTE <= peak < 8 * MEGABYTE + 4096


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_pythons_allocations(call: Callable[[Owners], object]) -> None:
    owners = gradients(2 * PIECE, torch.float32)
    warm(call, torch.float32)
    tracemalloc.start()
    try:
        call(owners)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
