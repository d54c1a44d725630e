"""The path: no waiting, any stream, graphs, threads, memory."""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import gradclip
from tests import oracle

from .support import DEVICE, parameters

pytestmark = pytest.mark.gpu


@pytest.fixture
def _no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("_no_waiting")
def test_the_host_never_waits() -> None:
    made = parameters([torch.randn(1000, device=DEVICE), torch.randn(99, device=DEVICE).half()])
    for max_norm in (1.0, 1e9):
        gradclip.clip_(made, max_norm)
    gradclip.clip_grad_value_(made, 0.5)


def test_two_launches_whatever_the_length() -> None:
    for count in (1, 700):
        made = parameters([torch.randn(1000, device=DEVICE).bfloat16() for _ in range(count)])
        gradclip.clip_(made, 1.0)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            gradclip.clip_(made, 0.5)
            torch.cuda.synchronize()
        on_device = [e for e in seen.events() if e.device_type.name == "CUDA"]
        assert sorted(event.name for event in on_device) == ["scale", "sums"]


def test_side_streams_under_load() -> None:
    tensors = [torch.randn(100_000, device=DEVICE).bfloat16() for _ in range(8)]
    total = oracle.total_norm([t.cpu() for t in tensors])
    streams = [torch.cuda.Stream() for _ in range(4)]
    load = torch.randn(2000, 2000, device=DEVICE)
    torch.cuda.synchronize()
    results = []
    for turn in range(50):
        with torch.cuda.stream(streams[turn % 4]):
            load @ load
            results.append(gradclip.get_total_norm(tensors, dtype=torch.float64))
    torch.cuda.synchronize()
    assert {float(result) for result in results} == {total}


@pytest.mark.parametrize("warm", [True, False])
def test_graph_capture_and_replay(warm: bool) -> None:
    gradient = torch.zeros(100_000, device=DEVICE)
    made = parameters([gradient, torch.zeros(7, device=DEVICE).bfloat16()])
    gradclip.clip_(parameters([torch.ones(3, device=DEVICE)]), 1.0)  # images are loaded
    gradclip.clip_(parameters([torch.ones(3, device=DEVICE).bfloat16()]), 1.0)
    if warm:
        gradclip.clip_(made, 1.0)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        total = gradclip.clip_(made, 1.0, dtype=torch.float64)
    for turn in range(50):
        fresh = torch.randn(100_000, generator=torch.Generator().manual_seed(turn))
        gradient.copy_(fresh)
        graph.replay()
        assert float(total) == (exact := oracle.total_norm([fresh]))
        assert torch.equal(gradient.cpu(), oracle.clipped(fresh, exact, 1.0))
        gradclip.clip_(parameters([torch.randn(10, device=DEVICE)]), 1.0)


def test_threads() -> None:
    tensors = [[torch.randn(5000 + k, device=DEVICE)] for k in range(8)]
    found: list[float] = [0.0] * 8

    def work(place: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                total = gradclip.get_total_norm(tensors[place], dtype=torch.float64)
            found[place] = float(total)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [oracle.total_norm([one.cpu() for one in t]) for t in tensors]


def test_threads_that_share_a_stream() -> None:
    """Gradients of two types take two launches, between which another thread may launch."""
    lists = [
        [torch.randn(900 + k, device=DEVICE), torch.randn(99 + k, device=DEVICE).bfloat16()]
        for k in range(4)
    ]

    def totals(k: int) -> set[float]:
        found = [gradclip.get_total_norm(lists[k], dtype=torch.float64) for _ in range(300)]
        return set(torch.stack(found).tolist())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(totals, range(4)))
    finally:
        sys.setswitchinterval(interval)
    assert found == [{oracle.total_norm([one.cpu() for one in tensors])} for tensors in lists]


def test_cpu_and_cuda_gradients_in_one_list() -> None:
    tensors = [torch.randn(1000), torch.randn(5000, device=DEVICE), torch.randn(10).double()]
    copies = [t.cpu().clone() for t in tensors]
    total = float(gradclip.clip_(parameters(tensors), 1.0, dtype=torch.float64))
    assert total == oracle.total_norm(copies)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(tensor.cpu(), oracle.clipped(copy, total, 1.0))


def test_versions_are_bumped_once() -> None:
    gradient = torch.randn(10, device=DEVICE)
    before = gradient._version
    gradclip.clip_(parameters([gradient]), 1.0)
    assert gradient._version == before + 1


def test_memory_does_not_grow_with_gradients() -> None:
    made = parameters([torch.randn(50_000_000, device=DEVICE).bfloat16() for _ in range(4)])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradclip.clip_(made, 1.0)
    assert torch.cuda.max_memory_allocated() - before <= 8 << 20
