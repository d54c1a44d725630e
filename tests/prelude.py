"""The names that the snippets of `data/reports.jsonl` start from."""

import math
import unittest
from typing import Any

import torch


def par(gradient: Any, **options: Any) -> torch.nn.Parameter:
    """A parameter whose `.grad` is a copy of `gradient`."""
    values = gradient if isinstance(gradient, torch.Tensor) else torch.tensor(gradient, **options)
    owner = torch.nn.Parameter(torch.zeros_like(values))
    owner.grad = values.clone()
    return owner


def full(value: Any) -> Any:
    """The whole of a distributed tensor; anything else as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def near(a: Any, b: Any, tolerance: float = 1e-5) -> bool:
    """Whether `a` has the shape of `b` and lies within `tolerance` of its largest magnitude."""
    left, right = _as_double(full(a)), _as_double(full(b))
    if left.shape != right.shape or not right.isfinite().all():
        return False
    return bool(((left - right).abs() <= tolerance * right.abs().max()).all())


def need_cuda() -> None:
    """Skips the case without a GPU."""
    if not torch.cuda.is_available():
        raise unittest.SkipTest("needs CUDA")


def _as_double(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().double()
    return torch.tensor(value, dtype=torch.float64)


NAMES = {
    "math": math,
    "unittest": unittest,
    "torch": torch,
    "par": par,
    "full": full,
    "near": near,
    "need_cuda": need_cuda,
}
