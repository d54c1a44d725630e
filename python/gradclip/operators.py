"""Operators that run the eager functions on the gradients of a graph: torch.ops.gradclip."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._higher_order_ops.effects import _EffectType

from gradclip import arguments, rounding, totals
from gradclip.parameters import Parameters, warn
from gradclip.settings import Settings

if TYPE_CHECKING:
    from gradclip.gradients import Gradients

_LIBRARY = torch.library.Library("gradclip", "DEF")


def _found(gradients: list[Tensor]) -> "Gradients":
    from gradclip import gradients as reading

    return reading.given(Parameters.of(gradients))


def _values(constants: list[float], changing: list[Tensor | None]) -> list[Any]:
    """The numbers of a call: a tensor where there is one, else the constant."""
    pairs = zip(constants, changing, strict=True)
    return [constant if tensor is None else tensor for constant, tensor in pairs]


def _settings(
    constants: list[float], changing: list[Tensor | None], error_if_nonfinite: bool
) -> Settings:
    norm_type, max_norm, eps, scale = _values(constants, changing)
    return arguments.settings(norm_type, max_norm, eps, scale, error_if_nonfinite)


def _run_clip_(
    gradients: list[Tensor],
    constants: list[float],
    changing: list[Tensor | None],
    error_if_nonfinite: bool,
    dtype: torch.dtype | None,
) -> Tensor:
    from gradclip import clip

    settings = _settings(constants, changing, error_if_nonfinite)
    return clip.clip_found_(_found(gradients), settings, dtype)


def _run_total_and_factor(
    gradients: list[Tensor],
    constants: list[float],
    changing: list[Tensor | None],
    error_if_nonfinite: bool,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    from gradclip import clip

    settings = _settings(constants, changing, error_if_nonfinite)
    total, factor = clip.total_and_factor(_found(gradients), settings, dtype)
    return total, torch.tensor(factor, dtype=torch.float64, device="cpu")


def _run_scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    from gradclip import value

    scaled = gradient.clone()
    value.scale_([scaled], factor)
    return scaled


def _run_total_norm(
    tensors: list[Tensor],
    constants: list[float],
    changing: list[Tensor | None],
    error_if_nonfinite: bool,
    dtype: torch.dtype | None,
) -> Tensor:
    from gradclip import clip

    (norm_type,) = _values(constants, changing)
    return clip.get_total_norm(tensors, norm_type, error_if_nonfinite, dtype=dtype)


def _run_norms(
    gradients: list[Tensor],
    has_gradient: list[bool],
    constants: list[float],
    changing: list[Tensor | None],
    dtype: torch.dtype | None,
) -> Tensor:
    from gradclip import norms

    norm_type = arguments.order(*_values(constants, changing))
    found = _found(gradients)
    norm_of = norms.by_id(found, norm_type)
    in_order = iter(gradients)
    each = [norm_of[id(next(in_order))] if has else 0.0 for has in has_gradient]
    return rounding.tensor_of(each, dtype or found.total_dtype, found.device)


def _run_clip_with_norm_(
    gradients: list[Tensor], constants: list[float], changing: list[Tensor | None]
) -> None:
    from gradclip import value

    value.scale_(gradients, _coefficient(*_values(constants, changing)))


def _run_factor(
    gradients: list[Tensor], constants: list[float], changing: list[Tensor | None]
) -> Tensor:
    factor = _coefficient(*_values(constants, changing))
    _found(gradients)  # refuses what cannot be scaled before the first is written
    if isinstance(factor, Tensor):
        return factor.to(torch.float64)
    return torch.tensor(factor, dtype=torch.float64, device="cpu")


def _coefficient(max_norm: Any, total_norm: Any, eps: Any) -> float | Tensor:
    max_norm, eps = arguments.limit(max_norm, "max_norm"), arguments.epsilon(eps)
    return totals.coefficient(totals.float64_of(total_norm), max_norm, eps)


def _run_scale_(
    tensors: list[Tensor], constants: list[float], changing: list[Tensor | None]
) -> None:
    from gradclip import value

    (coefficient,) = _values(constants, changing)
    value.scale_(tensors, coefficient)


def _run_clamp_(
    gradients: list[Tensor], constants: list[float], changing: list[Tensor | None]
) -> None:
    from gradclip import engine

    (clip_value,) = _values(constants, changing)
    clip_value = arguments.limit(clip_value, "clip_value")
    engine.clamp_(_found(gradients), clip_value)


def _run_refuse_complex(
    gradients: list[Tensor], constants: list[float], changing: list[Tensor | None]
) -> Tensor:
    from gradclip import value

    (clip_value,) = _values(constants, changing)
    arguments.limit(clip_value, "clip_value")
    value.refuse_complex(_found(gradients))
    return gradients[0].clone()


_CHECKS: dict[str, Callable[..., object]] = {
    "clip_": lambda p, limit, eps, scale: arguments.settings(p, limit, eps, scale, False),
    "get_total_norm": arguments.order,
    "grad_norms": arguments.order,
    "clip_grads_with_norm_": _coefficient,
    "clip_grad_value_": lambda clip_value: arguments.limit(clip_value, "clip_value"),
    "scale_": arguments.coefficient,
}


def _run_check(
    function: str, constants: list[float], changing: list[Tensor | None], warning: str
) -> None:
    """What remains of a call without gradients: its errors and its warning."""
    _CHECKS[function](*_values(constants, changing))
    if warning:
        warn(warning)


def _fake_total(gradients: list[Tensor], *asked: Any) -> Tensor:
    return _fake_norms(gradients, *asked, size=())


def _fake_norms(gradients: list[Tensor], *asked: Any, size: tuple[int, ...]) -> Tensor:
    dtype: torch.dtype | None = asked[-1]
    double = any(gradient.dtype in totals.DOUBLE for gradient in gradients)
    dtype = dtype or (torch.float64 if double else torch.float32)
    return gradients[0].new_empty(size, dtype=dtype, layout=torch.strided)


def _fake_total_and_factor(gradients: list[Tensor], *asked: Any) -> tuple[Tensor, Tensor]:
    factor = torch.empty((), dtype=torch.float64, device="cpu")
    return _fake_total(gradients, *asked), factor


def _fake_factor(
    gradients: list[Tensor], constants: list[float], changing: list[Tensor | None]
) -> Tensor:
    total_norm = changing[1]
    device = torch.device("cpu") if total_norm is None else total_norm.device
    return torch.empty((), dtype=torch.float64, device=device)


def _define(schema: str, run: Any, fake: Any) -> None:
    """Where the graph breaks, as at sparse tensors, `run` is called outside of it; not traced."""
    name = schema.split("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, _disable_dynamo(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"gradclip::{name}", fake, lib=_LIBRARY)


_NUMBERS = "float[] constants, Tensor?[] changing"

_define(
    f"clip_(Tensor(a!)[] gradients, {_NUMBERS}, bool error_if_nonfinite, ScalarType? dtype) "
    "-> Tensor",
    _run_clip_,
    _fake_total,
)
_define(
    f"total_and_factor(Tensor[] gradients, {_NUMBERS}, bool error_if_nonfinite, "
    "ScalarType? dtype) -> (Tensor, Tensor)",
    _run_total_and_factor,
    _fake_total_and_factor,
)
_define(
    "scaled(Tensor gradient, Tensor factor) -> Tensor",
    _run_scaled,
    lambda gradient, factor: torch.empty_like(gradient),
)
_define(
    f"total_norm(Tensor[] tensors, {_NUMBERS}, bool error_if_nonfinite, ScalarType? dtype) "
    "-> Tensor",
    _run_total_norm,
    _fake_total,
)
_define(
    f"norms(Tensor[] gradients, bool[] has_gradient, {_NUMBERS}, ScalarType? dtype) -> Tensor",
    _run_norms,
    lambda gradients, has, *asked: _fake_norms(gradients, *asked, size=(len(has),)),
)
_define(
    f"clip_with_norm_(Tensor(a!)[] gradients, {_NUMBERS}) -> ()",
    _run_clip_with_norm_,
    lambda *arguments: None,
)
_define(
    f"factor(Tensor[] gradients, {_NUMBERS}) -> Tensor",
    _run_factor,
    _fake_factor,
)
_define(
    f"clamp_(Tensor(a!)[] gradients, {_NUMBERS}) -> ()",
    _run_clamp_,
    lambda *arguments: None,
)
_define(
    f"refuse_complex(Tensor[] gradients, {_NUMBERS}) -> Tensor",
    _run_refuse_complex,
    lambda gradients, *numbers: torch.empty_like(gradients[0]),
)
_define(
    f"scale_(Tensor(a!)[] tensors, {_NUMBERS}) -> ()",
    _run_scale_,
    lambda *arguments: None,
)
_define(
    f"check(str function, {_NUMBERS}, str warning) -> ()",
    _run_check,
    lambda *arguments: None,
)
# Without an effect the compiler drops an operator that has no result.
_LIBRARY._register_effectful_op("gradclip::check", _EffectType.ORDERED)
