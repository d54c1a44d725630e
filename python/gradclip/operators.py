"""Operators that run the eager functions on the gradients of a graph: torch.ops.gradclip."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from gradclip import totals
from gradclip.parameters import Parameters
from gradclip.settings import Settings

if TYPE_CHECKING:
    from gradclip.gradients import Gradients

_LIBRARY = torch.library.Library("gradclip", "DEF")


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


def _run_scale_(tensors: list[Tensor], coefficient: Tensor) -> None:
    from gradclip import value

    value.scale_(tensors, coefficient)


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
_define(
    "scale_(Tensor(a!)[] tensors, Tensor coefficient) -> ()",
    _run_scale_,
    lambda *arguments: None,
)
