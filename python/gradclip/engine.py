"""Sums, finish and writes on the host's side: the CPU engine, and torch operations for the rest."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from gradclip import _core, cuda, reference
from gradclip.gradients import Gradients
from gradclip.settings import Settings


def on_one_device(gradients: Gradients, settings: Settings) -> cuda.CudaEngine | None:
    """The engine of the CUDA device that needs no word of the host; None if there is no such."""
    device = gradients.sole_cuda
    counts_scaled = settings.norm_type == 0 and settings.scale != 1
    if device is None or counts_scaled:
        return None
    if not cuda.is_single_pass(gradients.core, settings.norm_type):
        return None
    return cuda.CudaEngine(gradients.core, device)


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
    for device in gradients.cuda:
        vector = cuda.CudaEngine(gradients.core, device).sums(norm_type, scale)
        everything = everything.merged(_core.Sums.from_list(vector.tolist()))
    for place in gradients.reference:
        part = reference_sums(gradients, place, norm_type, scale)
        everything = everything.merged(part)
    return everything


def sums_each(gradients: Gradients, norm_type: float) -> list[_core.Sums]:
    """The exact sums of each gradient apart, in list order, from one pass over all of them."""
    each = [_core.Sums() for _ in gradients.tensors]
    if gradients.fused:
        each = gradients.core.sums_each(norm_type, torch.get_num_threads())
    for device in gradients.cuda:
        _add_cuda_each(each, gradients, device, norm_type)
    for place in gradients.reference:
        each[place] = reference_sums(gradients, place, norm_type)
    return each


def _add_cuda_each(
    each: list[_core.Sums], gradients: Gradients, device: int, norm_type: float
) -> None:
    places = gradients.core.planned_places
    found = cuda.CudaEngine(gradients.core, device).sums_each(norm_type, len(places))
    for place, row in zip(places, found.tolist(), strict=True):
        each[place] = each[place].merged(_core.Sums.from_list(row))


def reference_sums(
    gradients: Gradients, place: int, norm_type: float, scale: _core.PowerScale | None = None
) -> _core.Sums:
    """The sums of one gradient by torch operations; meta and fake tensors have none."""
    tensor = gradients.tensors[place]
    if tensor.device.type == "meta" or is_fake(tensor):
        return _core.Sums()
    vector = _reference_vector(gradients, place, norm_type, scale)
    return _core.Sums.from_list(vector.tolist())


def _reference_vector(
    gradients: Gradients, place: int, norm_type: float, scale: _core.PowerScale | None
) -> Tensor:
    return reference.sums(
        gradients.tensors[place],
        norm_type,
        scale_exponent=scale.exponent if scale and scale.exponent is not None else 0,
        divisor=scale.divisor if scale else None,
        owned=gradients.owned_of(place),
    )


def scale_(gradients: Gradients, factor: float | Tensor) -> None:
    """Multiplies all gradients by a factor in place; a factor of 1 writes nothing.

    A 0-dim tensor on the device of all gradients is not read by the host, if that is not the CPU.
    """
    if isinstance(factor, Tensor):
        if factor.device.type != "cpu" and all(
            t.device == factor.device for t in gradients.tensors
        ):
            return _scale_on_devices(gradients, factor.to(torch.float64))
        factor = float(factor)
    if factor != 1:
        _scale_on_devices(gradients, factor)
        if gradients.fused:
            gradients.core.scale(factor, torch.get_num_threads())
    return None


def _scale_on_devices(gradients: Gradients, factor: float | Tensor) -> None:
    engines = _ready_engines(gradients, "scale")
    factors = [_on(factor, engine.device) for engine in engines]
    for place in gradients.reference:
        tensor = gradients.tensors[place]
        reference.scale_(tensor, _on(factor, tensor.device))
    for engine, on_device in zip(engines, factors, strict=True):
        engine.scale_(on_device)
    written(gradients)


def _ready_engines(gradients: Gradients, kind: str) -> list[cuda.CudaEngine]:
    """The engines of all devices, with all that a change could lack before the first write."""
    engines = [cuda.CudaEngine(gradients.core, device) for device in gradients.cuda]
    for engine in engines:
        engine.prepare(kind)
    return engines


def _on(factor: float | Tensor, device: torch.device) -> Tensor:
    """A factor on a device, without a copy from the host that would wait for it."""
    if isinstance(factor, Tensor):
        return factor
    return torch.full((), factor, dtype=torch.float64, device=device)


def clamp_(gradients: Gradients, limit: float) -> None:
    """Limits every element of all gradients to [-limit, limit] in place."""
    engines = _ready_engines(gradients, "clamp")
    for place in gradients.reference:
        reference.clamp_(gradients.tensors[place], limit)
    for engine in engines:
        engine.clamp_(limit)
    if gradients.fused:
        gradients.core.clamp(limit, torch.get_num_threads())
    written(gradients)


def written(gradients: Gradients) -> None:
    """Tells autograd that the gradients were written, as torch's in-place operations do."""
    torch.autograd.graph.increment_version(gradients.tensors)


def digests(gradients: Gradients) -> list[int]:
    """The digest of each gradient, of all its elements: see `reference.digest`."""
    threads = torch.get_num_threads()
    return [reference.digest(tensor, threads) for tensor in gradients.tensors]
