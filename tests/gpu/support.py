"""Gradients on the device, and the same bits on the host; functions in a process of their own."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradclip
from gradclip import _core, cuda
from tests import oracle

ROOT = Path(__file__).resolve().parents[2]
DEVICE = torch.device("cuda", 0)
REAL = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def parameters(gradients: Sequence[Tensor]) -> list[nn.Parameter]:
    """Parameters that hold these very tensors as gradients."""
    made = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.empty_like(gradient, memory_format=torch.preserve_format))
        parameter.grad = gradient
        made.append(parameter)
    return made


def host_sums(tensors: Sequence[Tensor], p: float) -> list[int]:
    """The sums by the CPU engine."""
    return _core.Gradients.from_tensors([t.cpu() for t in tensors]).sums(p, 8).to_list()


def device_sums(tensors: Sequence[Tensor], p: float) -> list[int]:
    """The sums by the kernels."""
    core = _core.Gradients.from_tensors(list(tensors))
    found: list[int] = cuda.CudaEngine(core, 0).sums(p).tolist()
    return found


def heavy(size: int, dtype: torch.dtype, sigma: float = 8.0) -> Tensor:
    """Log-normal magnitudes of either sign."""
    limit = 0.99 * float(torch.tensor(torch.finfo(dtype).max, dtype=torch.float64).log())
    powers = torch.randn(size, device=DEVICE, dtype=torch.float64) * sigma
    signs = torch.randn(size, device=DEVICE, dtype=torch.float64).sign()
    return (powers.clamp(-limit, limit).exp() * signs).to(dtype)


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor."""
    return tensor.detach().contiguous().view(torch.uint8)


def clips_exactly(tensors: Sequence[Tensor]) -> None:
    """Asserts that a clip of these gradients gives the bits of the oracle."""
    copies = [tensor.cpu().clone() for tensor in tensors]
    total = gradclip.clip_(parameters(tensors), 1.0, dtype=torch.float64)
    assert float(total) == (exact := oracle.total_norm(copies))
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(bits(tensor.cpu()), bits(oracle.clipped(copy, exact, 1.0)))


@contextmanager
def refused(
    tensors: Sequence[Tensor], words: str, error: type[Exception] = RuntimeError
) -> Iterator[None]:
    """A block that raises, in these words, and leaves every bit of these gradients alone."""
    kept = [tensor.cpu().clone() for tensor in tensors]
    with pytest.raises(error, match=words):
        yield
    for tensor, copy in zip(tensors, kept, strict=True):
        assert torch.equal(bits(tensor.cpu()), bits(copy))


def run_alone(function: Callable[[], None], *folders: Path) -> None:
    """Calls a function of a module in a process of its own, these folders first in its path."""
    path = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", f"import {function.__module__} as m; m.{function.__name__}()"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
