"""Gradients to test with, and the calls that every test makes."""

import math
from collections.abc import Iterable, Sequence

import torch

import gradclip

EXACT_NORMS = [0.0, 1.0, 2.0, math.inf, -math.inf]
"""The norm types whose total is the correctly rounded exact norm."""

REAL_DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

FLOAT8_DTYPES = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]


def parameter(gradient: torch.Tensor) -> torch.nn.Parameter:
    """A parameter whose `.grad` is this very tensor."""
    data = torch.zeros((), dtype=gradient.dtype, device=gradient.device).expand(gradient.shape)
    has_gradients = gradient.is_floating_point() or gradient.is_complex()
    owner = torch.nn.Parameter(data, requires_grad=has_gradients)
    owner.grad = gradient
    return owner


def parameters(gradients: Iterable[torch.Tensor]) -> list[torch.nn.Parameter]:
    """A parameter for each gradient."""
    return [parameter(gradient) for gradient in gradients]


def gradient_of(owner: torch.nn.Parameter) -> torch.Tensor:
    """The gradient of a parameter that has one."""
    assert owner.grad is not None
    return owner.grad


def total(gradients: Iterable[torch.Tensor], p: float = 2.0) -> float:
    """The total norm by gradclip, in float64."""
    return gradclip.clip_(parameters(gradients), math.inf, p, dtype=torch.float64).item()


def random_values(
    shape: Sequence[int] | int, dtype: torch.dtype, *, spread: int = 0, seed: int = 0
) -> torch.Tensor:
    """Normal values times powers of two up to 2**spread either way, inside the type's range."""
    size = (shape,) if isinstance(shape, int) else tuple(shape)
    random = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        part = torch.float32 if dtype == torch.complex64 else torch.float64
        return torch.view_as_complex(random_values((*size, 2), part, spread=spread, seed=seed))
    values = torch.randn(size, dtype=torch.float64, generator=random)
    powers = torch.randint(-spread, spread + 1, size, generator=random)
    largest = torch.finfo(dtype).max
    return torch.ldexp(values, powers).clamp(-largest, largest).to(dtype)


FULL_SPREAD = {
    torch.float16: 24,
    torch.bfloat16: 140,
    torch.float32: 160,
    torch.float64: 1100,
    torch.complex64: 160,
    torch.complex128: 1100,
}
"""The `spread` that reaches the largest numbers of a type and its subnormals."""
