"""Scaling and value clipping in place, slice by slice."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch._compile import _disable_dynamo

from gradclip.rounding import rounded

from .slices import slices, unexpanded
from .sparse import coalesced

_Change: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""A piece of a gradient -> what is to stand in its place."""


@_disable_dynamo
@torch.no_grad()
def scale_(tensor: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiplies a gradient by a factor in place; a factor of exactly 1 leaves every bit as it is.

    tensor: strided or sparse COO, real or complex floating point (float8 and complex32 included),
        any device. float64 and complex128 elements are multiplied in float64; narrower ones as
        float32(x) * float32(factor) in float32, rounded to the tensor's type, ties to even. A
        stride-0 dimension is scaled once. An uncoalesced sparse tensor keeps its listed values,
        each scaled, and so its dense form is scaled up to their rounding.
    factor: float64, 0-dim, any device; never read by the host.
    """
    if not tensor.is_meta:
        with _writing(tensor):
            _rewrite(_reals(tensor), _times(factor, tensor))


@_disable_dynamo
@torch.no_grad()
def clamp_(tensor: torch.Tensor, limit: float) -> None:
    """Limits a gradient's elements to [-limit, limit] in place; NaN stays NaN.

    tensor: strided or sparse COO, real floating point (float8 included), any device. An
        uncoalesced sparse tensor is replaced by its coalesced form, since an index listed twice
        counts as its sum (exact, rounded to float64 and then to the type): this needs a copy of it.
    limit: at least 0; rounded to the tensor's type, but to no float8.
    Raises TypeError for complex gradients, which have no order.
    """
    if tensor.is_complex():
        raise TypeError(f"a gradient is {tensor.dtype}, which has no order; clip by norm instead")
    if tensor.is_meta:
        return
    with _writing(tensor):
        if tensor.layout == torch.sparse_coo and not tensor.is_coalesced():
            tensor.copy_(coalesced(tensor))
        _rewrite(_reals(tensor), _limited(limit, tensor))


@_disable_dynamo
@torch.no_grad()
def rehearse(tensor: torch.Tensor) -> None:
    """Scales none of a gradient's elements: raises what a subclass raises when it is written."""
    reals = _reals(tensor)
    nothing = (reals if reals.dim() else reals.unsqueeze(0))[:0]
    factor = torch.full((), 0.5, dtype=torch.float64, device=tensor.device)
    nothing.copy_(_times(factor, tensor)(nothing))


def _writing(tensor: torch.Tensor) -> torch.inference_mode:
    """Inference tensors may be written in inference mode alone; no graph can hold on to them."""
    return torch.inference_mode(mode=torch.is_inference_mode_enabled() or tensor.is_inference())


def _times(factor: torch.Tensor, tensor: torch.Tensor) -> _Change:
    is_double = tensor.dtype in (torch.float64, torch.complex128)
    is_one = (factor == 1).to(tensor.device)
    wide = (factor if is_double else factor.to(torch.float32)).to(tensor.device)

    def scaled(piece: torch.Tensor) -> torch.Tensor:
        product = piece * wide if is_double else (piece.to(torch.float32) * wide).to(piece.dtype)
        if piece.element_size() > 1:
            return torch.where(is_one, piece, product)
        kept = torch.where(is_one, piece.view(torch.uint8), product.view(torch.uint8))
        return kept.view(piece.dtype)

    return scaled


def _limited(limit: float, tensor: torch.Tensor) -> _Change:
    if tensor.element_size() == 1:
        return lambda piece: piece.to(torch.float32).clamp(-limit, limit).to(piece.dtype)
    bound = rounded(limit, tensor.dtype)
    return lambda piece: piece.clamp(-bound, bound)


def _reals(tensor: torch.Tensor) -> torch.Tensor:
    """The stored real numbers of a gradient: listed values, and the parts of complex elements.

    A conjugated view is undone, since scaling by a real number commutes with it.
    """
    stored = tensor._values() if tensor.layout == torch.sparse_coo else tensor
    if not stored.is_complex():
        return stored
    return torch.view_as_real(stored.conj() if stored.is_conj() else stored)


def _rewrite(reals: torch.Tensor, change: _Change) -> None:
    elements, _ = unexpanded(reals)
    for piece in slices(elements):
        piece.copy_(change(piece))
