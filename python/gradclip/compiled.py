"""The same functions under torch.compile: opaque operators, so that no graph breaks.

Inside a graph gradients are inputs like any other.
"""

from typing import Any

import torch
from torch import Tensor

from gradclip import operators  # noqa: F401 -- registers torch.ops.gradclip
from gradclip.parameters import Parameters, ParametersLike, unzipped
from gradclip.settings import Settings


def clip_(
    parameters: ParametersLike, attribute: str, settings: Settings, dtype: torch.dtype | None
) -> Tensor:
    """`gradclip.clip_` in a graph, with arguments that were checked."""
    gradients = _gradients(_listed(parameters), attribute)
    if not gradients:
        return torch.zeros((), dtype=dtype or torch.float32)
    arguments = (*settings, dtype)  # `Settings(*numbers)` is the way back
    result: Tensor
    if _any_complex(gradients):
        result, factor = torch.ops.gradclip.total_and_factor(gradients, *arguments)
        _copy_scaled_(gradients, factor)
    else:
        result = torch.ops.gradclip.clip_(gradients, *arguments)
    return result


def total_norm(tensors: ParametersLike, settings: Settings, dtype: torch.dtype | None) -> Tensor:
    """`gradclip.get_total_norm` in a graph."""
    given = list(_listed(tensors).tensors)
    if not given:
        return torch.zeros((), dtype=dtype or torch.float32)
    result: Tensor = torch.ops.gradclip.total_norm(
        given, settings.norm_type, settings.error_if_nonfinite, dtype
    )
    return result


def clip_with_norm_(
    parameters: ParametersLike,
    attribute: str,
    max_norm: float,
    total_norm: float | Tensor,
    eps: float,
) -> None:
    """`gradclip.clip_grads_with_norm_` in a graph."""
    from gradclip.clip import refuse_raw_gradients

    given = _listed(parameters)
    refuse_raw_gradients(given, attribute)
    gradients = _gradients(given, attribute)
    total_norm = _as_tensor(total_norm)
    if _any_complex(gradients):
        _copy_scaled_(gradients, torch.ops.gradclip.factor(gradients, max_norm, total_norm, eps))
    elif gradients:
        torch.ops.gradclip.clip_with_norm_(gradients, max_norm, total_norm, eps)


def clamp_(parameters: ParametersLike, attribute: str, clip_value: float) -> None:
    """`gradclip.clip_grad_value_` in a graph."""
    gradients = _gradients(_listed(parameters), attribute)
    if _any_complex(gradients):
        # The operator raises; it would not run if its result were not used.
        gradients[0].copy_(torch.ops.gradclip.refuse_complex(gradients))
    elif gradients:
        torch.ops.gradclip.clamp_(gradients, clip_value)


def scale_(tensors: ParametersLike, coefficient: float | Tensor) -> None:
    """`gradclip.scale_` in a graph."""
    given = list(_listed(tensors).tensors)
    coefficient = _as_tensor(coefficient)
    if _any_complex(given):
        _copy_scaled_(given, coefficient)
    elif given:
        torch.ops.gradclip.scale_(given, coefficient)


def _as_tensor(number: float | Tensor) -> Tensor:
    return number if isinstance(number, Tensor) else torch.tensor(number, dtype=torch.float64)


def _any_complex(gradients: list[Tensor]) -> bool:
    """Whether `copy_` has to write: no other operator that writes complex ones passes Inductor."""
    return any(gradient.is_complex() for gradient in gradients)


def _copy_scaled_(gradients: list[Tensor], factor: Tensor) -> None:
    scaled = [torch.ops.gradclip.scaled(gradient, factor) for gradient in gradients]
    for gradient, result in zip(gradients, scaled, strict=True):  # one listed twice is scaled once
        gradient.copy_(result)


def _listed(parameters: ParametersLike) -> Parameters:
    """`parameters.listed` without what Dynamo does not trace: calls to the core, and warnings."""
    if isinstance(parameters, Tensor):
        parameters = (parameters,)
    elif isinstance(parameters, torch.nn.Module):
        parameters = parameters.named_parameters()
    entries: tuple[Any, ...] = tuple(parameters)
    names = None
    if entries and isinstance(entries[0], tuple):
        names, entries = unzipped(entries)
    return Parameters(entries, names, are_plain=True)


def _gradients(given: Parameters, attribute: str) -> list[Tensor]:
    found = [getattr(parameter, attribute) for parameter in given.tensors]
    return [gradient for gradient in found if gradient is not None]
