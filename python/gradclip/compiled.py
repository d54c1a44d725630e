"""The same functions under torch.compile: opaque operators, so that no graph breaks.

Inside a graph gradients are inputs like any other. The operators run the eager functions on them.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from gradclip import totals
from gradclip.parameters import Parameters, ParametersLike, _unzipped
from gradclip.settings import Settings

if TYPE_CHECKING:
    from gradclip.gradients import Gradients

_LIBRARY = torch.library.Library("gradclip", "DEF")


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
    from gradclip import clip

    given = _listed(parameters)
    clip._refuse_raw_gradients(given, attribute)
    gradients = _gradients(given, attribute)
    if not isinstance(total_norm, Tensor):
        total_norm = torch.tensor(total_norm, dtype=torch.float64)
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
        names, entries = _unzipped(entries)
    return Parameters(entries, names, are_plain=True)


def _gradients(given: Parameters, attribute: str) -> list[Tensor]:
    found = [getattr(parameter, attribute) for parameter in given.tensors]
    return [gradient for gradient in found if gradient is not None]


def _found(gradients: list[Tensor]) -> "Gradients":
    from gradclip import gradients as reading

    return reading.given(Parameters.of(gradients))


def _run_clip_(gradients: list[Tensor], *asked: Any) -> Tensor:
    from gradclip import clip

    *numbers, dtype = asked
    return clip.clip_found_(_found(gradients), Settings(*numbers), dtype)


def _run_total_and_factor(gradients: list[Tensor], *asked: Any) -> tuple[Tensor, Tensor]:
    from gradclip import clip

    *numbers, dtype = asked
    total, factor = clip.total_and_factor(_found(gradients), Settings(*numbers), dtype)
    return total, torch.tensor(factor, dtype=torch.float64)


def _run_scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    from gradclip import value

    scaled = gradient.clone()
    value.scale_([scaled], factor)
    return scaled


def _run_total_norm(
    tensors: list[Tensor], norm_type: float, error_if_nonfinite: bool, dtype: torch.dtype | None
) -> Tensor:
    from gradclip import clip

    return clip.get_total_norm(tensors, norm_type, error_if_nonfinite, dtype=dtype)


def _run_clip_with_norm_(
    gradients: list[Tensor], max_norm: float, total_norm: Tensor, eps: float
) -> None:
    from gradclip import value

    total = totals.float64_of(total_norm)
    value.scale_(gradients, totals.coefficient(total, max_norm, eps))


def _run_factor(gradients: list[Tensor], max_norm: float, total_norm: Tensor, eps: float) -> Tensor:
    _found(gradients)  # refuses what cannot be scaled before the first is written
    factor = totals.coefficient(totals.float64_of(total_norm), max_norm, eps)
    return torch.as_tensor(factor, dtype=torch.float64)


def _run_clamp_(gradients: list[Tensor], clip_value: float) -> None:
    from gradclip import engine

    engine.clamp_(_found(gradients), clip_value)


def _run_refuse_complex(gradients: list[Tensor]) -> Tensor:
    from gradclip import value

    value.refuse_complex(_found(gradients))
    return gradients[0].clone()


def _fake_total(gradients: list[Tensor], *arguments: Any) -> Tensor:
    dtypes = [argument for argument in arguments if isinstance(argument, torch.dtype)]
    double = any(gradient.dtype in totals.DOUBLE for gradient in gradients)
    dtype = dtypes[0] if dtypes else torch.float64 if double else torch.float32
    return gradients[0].new_empty((), dtype=dtype, layout=torch.strided)


def _fake_total_and_factor(gradients: list[Tensor], *arguments: Any) -> tuple[Tensor, Tensor]:
    factor = torch.empty((), dtype=torch.float64)
    return _fake_total(gradients, *arguments), factor


def _define(schema: str, run: Any, fake: Any) -> None:
    """Where the graph breaks, as at sparse tensors, `run` is called outside of it; not traced."""
    name = schema.split("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, _disable_dynamo(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"gradclip::{name}", fake, lib=_LIBRARY)


_define(
    "clip_(Tensor(a!)[] gradients, float norm_type, float max_norm, float eps, float loss_scale, "
    "bool error_if_nonfinite, ScalarType? dtype) -> Tensor",
    _run_clip_,
    _fake_total,
)
_define(
    "total_and_factor(Tensor[] gradients, float norm_type, float max_norm, float eps, "
    "float loss_scale, bool error_if_nonfinite, ScalarType? dtype) -> (Tensor, Tensor)",
    _run_total_and_factor,
    _fake_total_and_factor,
)
_define(
    "scaled(Tensor gradient, Tensor factor) -> Tensor",
    _run_scaled,
    lambda gradient, factor: torch.empty_like(gradient),
)
_define(
    "total_norm(Tensor[] tensors, float norm_type, bool error_if_nonfinite, ScalarType? dtype) "
    "-> Tensor",
    _run_total_norm,
    _fake_total,
)
_define(
    "clip_with_norm_(Tensor(a!)[] gradients, float max_norm, Tensor total_norm, float eps) -> ()",
    _run_clip_with_norm_,
    lambda *arguments: None,
)
_define(
    "factor(Tensor[] gradients, float max_norm, Tensor total_norm, float eps) -> Tensor",
    _run_factor,
    lambda gradients, max_norm, total_norm, eps: total_norm.new_empty((), dtype=torch.float64),
)
_define(
    "clamp_(Tensor(a!)[] gradients, float clip_value) -> ()",
    _run_clamp_,
    lambda *arguments: None,
)
_define(
    "refuse_complex(Tensor[] gradients) -> Tensor",
    _run_refuse_complex,
    lambda gradients: torch.empty_like(gradients[0]),
)
