"""The total norm as callers see it, and the float64 behind it."""

import math

import torch
from torch import Tensor

from gradclip import _core, arguments

DOUBLE = frozenset({torch.float64, torch.complex128})
"""Gradients of these types make the returned total float64."""

_EXACT = "_gradclip_float64"
_FLOAT32_PLACE = 6
"""Where a result of the kernels holds the total as float32."""


def unscaled(total: float, norm_type: float, loss_scale: float) -> float:
    """The total of gradients divided by a loss scale; p = 0 counts elements and has no scale."""
    return total if norm_type == 0 else _core.unscaled(total, loss_scale)


def tensor_of(total: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A 0-dim plain tensor that remembers the float64 it was rounded from."""
    return _remembering(torch.tensor(total, dtype=dtype, device=device), total)


def from_result(result: Tensor, dtype: torch.dtype) -> Tensor:
    """The same from what the kernels wrote (`CudaEngine.totals`), without another launch."""
    total = result[_FLOAT32_PLACE] if dtype == torch.float32 else total_in(result).to(dtype)
    return _remembering(total, result)


def _remembering(total_norm: Tensor, exact: float | Tensor) -> Tensor:
    setattr(total_norm, _EXACT, (exact, _version(total_norm)))
    return total_norm


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was written in place; inference tensors do not count."""
    return None if tensor.is_inference() else tensor._version


def remembered(total_norm: Tensor) -> float | Tensor:
    """The float64 that a total norm was rounded from, whatever was done to the tensor since.

    What the tensor says where it remembers none, as one that a compiled graph returned may.
    """
    known = _known(total_norm)
    if known is not None:
        return known
    return float(total_norm) if total_norm.device.type == "cpu" else total_norm.to(torch.float64)


def total_in(result: Tensor) -> Tensor:
    """The total in what the kernels wrote: 0-dim, float64."""
    return result.view(torch.float64)[0]


def float64_of(total_norm: float | Tensor) -> float | Tensor:
    """The float64 behind a total norm; what the tensor says itself where it was changed since.

    A write that left the same value in the tensor counts as a change too: only its version tells.
    Writes that no version counts (through `.data`, by collectives, to inference tensors) show by
    their value.

    A tensor for a total on a device, which the host does not read.

    Raises:
        ValueError: the total is negative and on the host.
    """
    if isinstance(total_norm, Tensor) and total_norm.device.type != "cpu":
        exact = _float64_on_device(total_norm)
        same = exact.to(total_norm.dtype) == total_norm
        return torch.where(same, exact, total_norm.to(torch.float64))
    number = arguments.total(total_norm)
    if not isinstance(total_norm, Tensor) or (known := _unwritten(total_norm)) is None:
        return number
    remembered_number = float(known)
    is_same = _rounded(remembered_number, total_norm.dtype) == number
    return remembered_number if is_same else number


def _float64_on_device(total_norm: Tensor) -> Tensor:
    known = _unwritten(total_norm)
    if isinstance(known, Tensor):
        return known
    value = total_norm.reshape(-1)[0].to(torch.float64)
    return value if known is None else torch.full_like(value, known)


def _known(total_norm: Tensor) -> float | Tensor | None:
    known, _ = getattr(total_norm, _EXACT, (None, None))
    return total_in(known) if isinstance(known, Tensor) else known


def _unwritten(total_norm: Tensor) -> float | Tensor | None:
    """What a total remembers, unless it was written in place since."""
    _, version = getattr(total_norm, _EXACT, (None, None))
    return _known(total_norm) if version == _version(total_norm) else None


def coefficient(total: float | Tensor, max_norm: float, eps: float) -> float | Tensor:
    """The clip coefficient; on a device it stays there, and is 1 for a negative total."""
    if not isinstance(total, Tensor):
        return _core.coefficient(total, max_norm, eps)
    if max_norm == math.inf:
        return torch.ones_like(total)
    ratio = torch.full_like(total, max_norm) / (total + eps)
    ratio = torch.where(ratio.isnan() & ~total.isnan(), 1.0, ratio.clamp(max=1.0))
    return torch.where(total < 0, 1.0, ratio)


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype))
