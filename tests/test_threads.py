"""Threads of torch, threads of Python, and forked processes."""

import multiprocessing
import os
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


def in_its_own_process(*lines: str, timeout: float = 100) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's list of threads")
def test_thousands_of_threads_are_not_started() -> None:
    in_its_own_process(
        "import os, torch, gradclip",
        "from tests.test_threads import engine_threads, many_elements",
        "torch.set_num_threads(5000)",
        "gradclip.get_total_norm(many_elements())",
        "assert 1 < engine_threads() <= max(8, os.cpu_count()), engine_threads()",
    )


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on a user's threads")
def test_without_threads_the_caller_works_alone() -> None:
    """Where no thread can be started; the limit does not bind root, so another user is taken."""
    in_its_own_process(
        "import os, resource, threading, torch, gradclip",
        "from tests.test_threads import many_elements, parameter_of",
        "gradients = many_elements()",
        "torch.set_num_threads(1)",
        "want = gradclip.get_total_norm(gradients, dtype=torch.float64).item()",
        "each = gradclip.grad_norms([parameter_of(g) for g in gradients]).tolist()",
        "resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))",
        "if os.getuid() == 0: os.setuid(65534)",
        "try:",
        "    threading.Thread(target=print).start()",
        "except RuntimeError:",
        "    pass",
        "else:",
        "    raise SystemExit(0)  # nothing to test: this system starts threads anyway",
        "torch.set_num_threads(4)",
        "owners = [parameter_of(g) for g in gradients]",
        "assert gradclip.grad_norms(owners).tolist() == each",
        "assert gradclip.clip_(owners, want / 2, eps=0.0, dtype=torch.float64).item() == want",
        "assert torch.equal(owners[0].grad, gradients[0] * 0.5)",
        "gradclip.clip_grad_value_(owners, 0.25)",
        "assert max(o.grad.abs().max() for o in owners) == 0.25",
    )


FORKS = 60


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_while_threads_are_started() -> None:
    """The child must not wait for what another thread of its parent was in the middle of."""
    in_its_own_process(
        "import os, signal, threading, time, torch, gradclip",
        "from tests.test_threads import FORKS",
        "gradients = [torch.ones(100_000)]",
        "stop = threading.Event()",
        "def start_threads():",
        "    for count in iter(lambda: 2 if stop.is_set() else 3, 2):",
        "        for size in (2, 7, 3, 8):",
        "            core.sums(2.0, size)",
        "core = gradclip._core.Gradients.from_tensors(gradients)",
        "other = threading.Thread(target=start_threads, daemon=True)",
        "other.start()",
        "torch.set_num_threads(2)",
        "hung = 0",
        "for attempt in range(FORKS):",
        "    time.sleep(0.001 * (attempt % 7))",
        "    if (child := os.fork()) == 0:",
        "        found = core.sums(2.0, 5).total(2.0)",
        "        os._exit(0 if found == 100_000**0.5 else 3)",
        "    end = time.monotonic() + 10",
        "    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:",
        "        time.sleep(0.002)",
        "    if done[0] == 0:",
        "        os.kill(child, signal.SIGKILL)",
        "        os.waitpid(child, 0)",
        "        hung += 1",
        "        break",
        "    assert done[1] == 0, done",
        "stop.set()",
        "assert not hung, f'the child of attempt {attempt} hung'",
    )
