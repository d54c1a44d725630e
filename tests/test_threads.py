"""Threads of torch, threads of Python, and forked processes."""

import multiprocessing
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import gradclip
from gradclip import _core
from tests import oracle

PARTS = 40


def parameter_of(values: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros_like(values))
    parameter.grad = values.clone()
    return parameter


def many_elements() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(10_007, generator=generator) for _ in range(PARTS)]


def clip_in_child(queue: "multiprocessing.Queue[float]") -> None:
    queue.put(gradclip.get_total_norm(many_elements(), dtype=torch.float64).item())


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_clips_too() -> None:
    """Threads do not survive a fork: a child that waited for its parent's would hang."""
    mine = gradclip.get_total_norm(many_elements(), dtype=torch.float64).item()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=clip_in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == mine
    child.join(timeout=60)
    assert child.exitcode == 0


def test_python_threads_clip_at_the_same_time() -> None:
    gradients = many_elements()
    expected = oracle.total_norm([torch.cat(gradients)[:20_000]], 2.0)

    def clip(_: int) -> float:
        parameter = parameter_of(torch.cat(gradients)[:20_000])
        return gradclip.clip_([parameter], 1.0, dtype=torch.float64).item()

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(clip, range(64))) == {expected}


def engine_threads() -> int:
    """How many threads of this process are the engine's; a new one is named a moment later."""
    time.sleep(0.5)
    names = (task / "comm" for task in Path("/proc/self/task").iterdir())
    return sum(name.read_text().startswith("gradclip-") for name in names)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's list of threads")
def test_torchs_thread_count_is_respected() -> None:
    """With one thread nothing is started; with three, three."""
    script = "\n".join(
        [
            "import torch, gradclip",
            "from tests.test_threads import engine_threads, many_elements",
            "gradients = many_elements()",
            "torch.set_num_threads(1)",
            "gradclip.get_total_norm(gradients)",
            "assert engine_threads() == 0, engine_threads()",
            "torch.set_num_threads(3)",
            "gradclip.get_total_norm(gradients)",
            "assert engine_threads() == 3, engine_threads()",
        ]
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_other_threads_run_while_sums_are_taken() -> None:
    """The interpreter's lock is free while the engine works, so a counting thread gets ahead.

    A long switch interval leaves no other way: Python code hands the lock on too rarely.
    """
    gradients = [torch.randn(1_000_000)]
    counted = [0]
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.2)
    counter = threading.Thread(target=count)
    counter.start()
    try:
        before = counted[0]
        gradclip.get_total_norm(gradients, norm_type=3.5)
        assert counted[0] - before > 1000
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        counter.join()


def test_what_a_plan_keeps_may_run_code_when_it_is_forgotten() -> None:
    """Such as code that clips."""

    class Last:
        def __del__(self) -> None:
            gradclip.get_total_norm([torch.ones(3)])

    held = torch.ones(77)
    _core.Gradients.from_tensors([held]).kept["last"] = Last()
    for size in range(1, 20):
        gradclip.get_total_norm([torch.ones(size)])
    assert not _core.Gradients.from_tensors([held]).kept
