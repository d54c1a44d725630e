"""The total norm as callers see it, and the float64 behind it."""

import torch
from torch import Tensor

from gradclip import arguments

_EXACT = "_gradclip_float64"


def unscaled(total: float, norm_type: float, loss_scale: float) -> float:
    """The total of gradients divided by a loss scale; p = 0 counts elements and has no scale."""
    return total if norm_type == 0 else total / loss_scale


def tensor_of(total: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A 0-dim plain tensor that remembers the float64 it was rounded from."""
    result = torch.tensor(total, dtype=dtype, device=device)
    setattr(result, _EXACT, total)
    return result


def float64_of(total_norm: float | Tensor) -> float:
    """The float64 behind a total norm; what the tensor says itself where it was changed since.

    Raises:
        ValueError: the total is negative.
    """
    number = arguments.total(total_norm)
    exact = getattr(total_norm, _EXACT, number)
    same = isinstance(total_norm, Tensor) and _rounded(exact, total_norm.dtype) == number
    return float(exact) if same else number


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype))
