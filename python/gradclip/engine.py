"""Sums, finish and writes on the host's side: the CPU engine, and torch operations for the rest."""

import torch
from torch._subclasses.fake_tensor import is_fake

from gradclip import _core, reference
from gradclip.gradients import Gradients


def total(gradients: Gradients, norm_type: float) -> float:
    """The total norm of all gradients together: float64, rounded once from the exact sum."""
    first = sums(gradients, norm_type)
    norm = first.total(norm_type)
    if norm is None:
        scale = sums(gradients, _core.leading_norm_type(norm_type)).scale(norm_type)
        norm = sums(gradients, norm_type, scale).total(norm_type, scale)
    assert norm is not None, "a scaled pass is final"
    return norm


def sums(
    gradients: Gradients, norm_type: float, scale: _core.PowerScale | None = None
) -> _core.Sums:
    """The exact sums over all gradients for one norm type."""
    everything = _core.Sums()
    if gradients.fused:
        everything = gradients.core.sums(norm_type, torch.get_num_threads(), scale)
    for place in gradients.reference:
        part = reference_sums(gradients, place, norm_type, scale)
        everything = everything.merged(part)
    return everything


def sums_each(gradients: Gradients, norm_type: float) -> list[_core.Sums]:
    """The exact sums of each gradient apart, in list order, from one pass over all of them."""
    each = [_core.Sums() for _ in gradients.tensors]
    if gradients.fused:
        each = gradients.core.sums_each(norm_type, torch.get_num_threads())
    for place in gradients.reference:
        each[place] = reference_sums(gradients, place, norm_type)
    return each


def reference_sums(
    gradients: Gradients, place: int, norm_type: float, scale: _core.PowerScale | None = None
) -> _core.Sums:
    """The sums of one gradient by torch operations; meta and fake tensors have none."""
    tensor, owned = gradients.tensors[place], gradients.owned_of(place)
    if tensor.device.type == "meta" or is_fake(tensor):
        return _core.Sums()
    exponent = scale.exponent if scale and scale.exponent is not None else 0
    divisor = scale.divisor if scale else None
    vector = reference.sums(
        tensor, norm_type, scale_exponent=exponent, divisor=divisor, owned=owned
    )
    return _core.Sums.from_list(vector.tolist())


def scale_(gradients: Gradients, factor: float) -> None:
    """Multiplies all gradients by a factor in place; a factor of 1 writes nothing."""
    if factor == 1:
        return
    if gradients.fused:
        gradients.core.scale(factor, torch.get_num_threads())
    for place in gradients.reference:
        tensor = gradients.tensors[place]
        reference.scale_(tensor, torch.tensor(factor, dtype=torch.float64, device=tensor.device))
    written(gradients)


def clamp_(gradients: Gradients, limit: float) -> None:
    """Limits every element of all gradients to [-limit, limit] in place."""
    if gradients.fused:
        gradients.core.clamp(limit, torch.get_num_threads())
    for place in gradients.reference:
        reference.clamp_(gradients.tensors[place], limit)
    written(gradients)


def written(gradients: Gradients) -> None:
    """Tells autograd that the gradients were written, as torch's in-place operations do."""
    torch.autograd.graph.increment_version(gradients.tensors)
