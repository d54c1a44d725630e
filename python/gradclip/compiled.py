"""The same functions under torch.compile: opaque operators, so that no graph breaks.

Inside a graph gradients are inputs like any other. Numbers that change between calls enter it as
tensors, so that a new value needs no new graph; the operators check them as the eager functions do.
DTensors, other wrapper subclasses and distributed options leave the graph for the eager function,
which decides at each call what ranks exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from gradclip import (
    arguments,
    notices,
    operators,  # noqa: F401 -- registers torch.ops.gradclip
)
from gradclip.grad_mode import without_grad
from gradclip.parameters import Parameters, ParametersLike, nothing_in, unzipped
from gradclip.sharding.options import Sharding

_Result = TypeVar("_Result")
_Numbers = tuple[list[float], list[Tensor | None]]
"""Constants of a graph, and the tensors that stand for those numbers which are none."""


def clip_(
    parameters: ParametersLike,
    attribute: str,
    numbers: tuple[Any, Any, Any, Any],
    error_if_nonfinite: bool,
    dtype: torch.dtype | None,
    like_torch: bool,
    sharding: Sharding,
) -> Tensor:
    """`gradclip.clip.clip_call_` in a graph."""
    given = _listed(parameters)
    gradients = _gradients(given, attribute)
    if sharding or _any_wrapper(given.tensors, gradients):
        from gradclip.clip import clip_call_

        passed = _passed(parameters, given)
        asked = (attribute, numbers, error_if_nonfinite, dtype, like_torch, sharding)
        return outside(clip_call_, passed, *asked)
    norm_type, max_norm, eps, scale = numbers
    constants, changing = _split(norm_type, max_norm, eps, 1.0 if scale is None else scale)
    dtype = arguments.result_dtype(dtype)
    if not gradients:
        warning = notices.of_empty(parameters, given, like_torch)
        warning = warning or notices.of_no_gradient(given, like_torch)
        torch.ops.gradclip.check("clip_", constants, changing, warning)
        return _zero(given, dtype)
    options = (constants, changing, error_if_nonfinite, dtype)
    result: Tensor
    if _any_complex(gradients):
        result, factor = torch.ops.gradclip.total_and_factor(gradients, *options)
        _copy_scaled_(gradients, factor)
    else:
        result = torch.ops.gradclip.clip_(gradients, *options)
    return result


def total_norm(
    tensors: ParametersLike,
    norm_type: Any,
    error_if_nonfinite: bool,
    dtype: torch.dtype | None,
    sharding: Sharding,
) -> Tensor:
    """`gradclip.get_total_norm` in a graph."""
    given = _listed(tensors)
    if sharding or _any_wrapper(given.tensors):
        from gradclip.clip import get_total_norm

        passed = _passed(tensors, given)
        return outside(
            get_total_norm, passed, norm_type, error_if_nonfinite, dtype=dtype, **sharding
        )
    constants, changing = _split(norm_type)
    dtype = arguments.result_dtype(dtype)
    if not given.tensors:
        torch.ops.gradclip.check("get_total_norm", constants, changing, "")
        return _zero(given, dtype)
    result: Tensor = torch.ops.gradclip.total_norm(
        list(given.tensors), constants, changing, error_if_nonfinite, dtype
    )
    return result


def grad_norms(
    parameters: ParametersLike,
    attribute: str,
    norm_type: Any,
    dtype: torch.dtype | None,
    sharding: Sharding,
) -> Tensor:
    """`gradclip.grad_norms` in a graph."""
    given = _listed(parameters)
    gradients = _gradients(given, attribute)
    if sharding or _any_wrapper(given.tensors, gradients):
        from gradclip.norms import grad_norms as eager

        passed = _passed(parameters, given)
        return outside(eager, passed, norm_type, dtype=dtype, grad=attribute, **sharding)
    constants, changing = _split(norm_type)
    dtype = arguments.result_dtype(dtype)
    if not gradients:
        warning = notices.of_empty(parameters, given, like_torch=False)
        torch.ops.gradclip.check("grad_norms", constants, changing, warning)
        size = len(given.tensors)
        return torch.zeros(size, dtype=dtype or torch.float32, device=given.device)
    has_gradient = [getattr(parameter, attribute) is not None for parameter in given.tensors]
    result: Tensor = torch.ops.gradclip.norms(gradients, has_gradient, constants, changing, dtype)
    return result


def clip_with_norm_(
    parameters: ParametersLike, attribute: str, max_norm: Any, total_norm: Any, eps: Any
) -> None:
    """`gradclip.clip_grads_with_norm_` in a graph."""
    from gradclip.clip import clip_grads_with_norm_, refuse_raw_gradients

    given = _listed(parameters)
    refuse_raw_gradients(given, attribute)
    gradients = _gradients(given, attribute)
    if _any_wrapper(given.tensors, gradients):
        passed = _passed(parameters, given)
        eager = clip_grads_with_norm_
        return outside(eager, passed, max_norm, total_norm, eps=eps, grad=attribute)
    constants, changing = _split(max_norm, total_norm, eps)
    if not gradients:
        torch.ops.gradclip.check("clip_grads_with_norm_", constants, changing, "")
    elif _any_complex(gradients):
        _copy_scaled_(gradients, torch.ops.gradclip.factor(gradients, constants, changing))
    else:
        torch.ops.gradclip.clip_with_norm_(gradients, constants, changing)
    return None


def clamp_(parameters: ParametersLike, attribute: str, clip_value: Any) -> None:
    """`gradclip.clip_grad_value_` in a graph."""
    given = _listed(parameters)
    gradients = _gradients(given, attribute)
    if _any_wrapper(given.tensors, gradients):
        from gradclip.value import clip_grad_value_

        passed = _passed(parameters, given)
        return outside(clip_grad_value_, passed, clip_value, grad=attribute)
    constants, changing = _split(clip_value)
    if not gradients:
        torch.ops.gradclip.check("clip_grad_value_", constants, changing, "")
    elif _any_complex(gradients):
        # The operator raises; it would not run if its result were not used.
        gradients[0].copy_(torch.ops.gradclip.refuse_complex(gradients, constants, changing))
    else:
        torch.ops.gradclip.clamp_(gradients, constants, changing)
    return None


def scale_(tensors: ParametersLike, coefficient: Any) -> None:
    """`gradclip.scale_` in a graph."""
    given = _listed(tensors)
    if _any_wrapper(given.tensors):
        from gradclip.value import scale_ as eager

        return outside(eager, _passed(tensors, given), coefficient)
    constants, changing = _split(coefficient)
    if not given.tensors:
        warning = notices.of_empty(tensors, given, like_torch=False)
        torch.ops.gradclip.check("scale_", constants, changing, warning)
    elif _any_complex(list(given.tensors)):
        factor = changing[0]
        if factor is None:
            factor = torch.full((), constants[0], dtype=torch.float64, device="cpu")
        _copy_scaled_(list(given.tensors), factor)
    else:
        torch.ops.gradclip.scale_(list(given.tensors), constants, changing)
    return None


@_disable_dynamo
@without_grad
def outside(function: Callable[..., _Result], *arguments: Any, **options: Any) -> _Result:
    """Calls an eager function outside of the graph, which breaks there."""
    return function(*arguments, **options)


def _split(*numbers: Any) -> _Numbers:
    """Numbers as the operators take them: what may change between calls as tensors."""
    constants: list[float] = []
    changing: list[Tensor | None] = []
    for number in numbers:
        constant, tensor = _constant_or_tensor(number)
        constants.append(constant)
        changing.append(tensor)
    return constants, changing


def _constant_or_tensor(number: Any) -> tuple[float, Tensor | None]:
    # Evaluated while Dynamo traces; loading it with gradclip would load sympy.
    from torch.fx.experimental.symbolic_shapes import has_static_value

    if isinstance(number, Tensor):
        return 0.0, number.detach() if number.requires_grad else number
    if isinstance(number, (int, float)):
        if has_static_value(number):
            return float(number), None
        # A product is what torch's pass over changing floats keeps from becoming a constant.
        return 0.0, torch.ones((), dtype=torch.float64, device="cpu") * number
    if hasattr(number, "dtype"):  # a NumPy scalar is traced as an array
        return 0.0, torch.as_tensor(number, device="cpu")
    return arguments.number(number, "argument"), None


def _any_wrapper(*lists: tuple[Tensor, ...] | list[Tensor]) -> bool:
    """Whether a tensor is a DTensor or another subclass that wraps tensors."""
    return any(hasattr(type(tensor), "__tensor_flatten__") for each in lists for tensor in each)


def _any_complex(gradients: list[Tensor]) -> bool:
    """Whether `copy_` has to write: no other operator that writes complex ones passes Inductor."""
    return any(gradient.is_complex() for gradient in gradients)


def _copy_scaled_(gradients: list[Tensor], factor: Tensor) -> None:
    scaled = [torch.ops.gradclip.scaled(gradient, factor) for gradient in gradients]
    for gradient, result in zip(gradients, scaled, strict=True):  # one listed twice is scaled once
        gradient.copy_(result)


def _zero(given: Parameters, dtype: torch.dtype | None) -> Tensor:
    return torch.zeros((), dtype=dtype or torch.float32, device=given.device)


def _listed(parameters: ParametersLike) -> Parameters:
    """`parameters.listed` without what Dynamo does not trace: calls to the core."""
    passed = parameters
    if isinstance(parameters, Tensor):
        parameters = (parameters,)
    elif isinstance(parameters, torch.nn.Module):
        parameters = parameters.named_parameters()
    entries: tuple[Any, ...] = tuple(parameters)
    if not entries:
        return Parameters((), None, are_plain=True, nothing=nothing_in(passed))
    names = None
    if isinstance(entries[0], tuple):
        names, entries = unzipped(entries)
    return Parameters(entries, names, are_plain=True)


def _passed(parameters: ParametersLike, given: Parameters) -> ParametersLike:
    """What an eager function may list again: an iterator was walked."""
    if isinstance(parameters, (Tensor, torch.nn.Module)):
        return parameters
    if given.names is None:
        return given.tensors
    return list(zip(given.names, given.tensors, strict=True))


def _gradients(given: Parameters, attribute: str) -> list[Tensor]:
    found = [getattr(parameter, attribute) for parameter in given.tensors]
    return [gradient for gradient in found if gradient is not None]
