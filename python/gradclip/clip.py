"""Clipping by the total norm: torch's functions, on exact sums."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradclip import _core, arguments, compiled, engine, gradients, totals
from gradclip.grad_mode import without_grad
from gradclip.gradients import Gradients
from gradclip.parameters import Parameters, ParametersLike, listed, warn
from gradclip.sharding import clip as sharded
from gradclip.sharding.clip import tell_all_ranks
from gradclip.sharding.contribution import Settings
from gradclip.sharding.session import Sharding, refuse_unknown, session_for

if TYPE_CHECKING:
    from typing_extensions import Unpack


@without_grad
def clip_(
    parameters: ParametersLike,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    dtype: torch.dtype | None = None,
    eps: float = 1e-6,
    scale: float | Tensor | None = None,
    grad: str = "grad",
    **sharding: Unpack[Sharding],
) -> Tensor:
    """Clips gradients in place so that their total norm is at most `max_norm`.

    The gradients of all parameters count as one vector. Its norm is the correctly rounded exact
    value for p in {0, 1, 2, inf, -inf}, so its bits depend on nothing but the elements. Gradients
    are multiplied by min(1, max_norm / (total + eps)); nothing is written when that is 1.

    Args:
        parameters: a Module, a tensor, an iterable of tensors (walked once), or of (name, tensor)
            pairs, which make errors name the parameter. Gradients may be float16, bfloat16,
            float32, float64, float8, complex64 or complex128, in any mix, of any shape, strided
            or sparse COO. A parameter listed twice counts once.
        max_norm: the limit, >= 0; inf never changes a gradient.
        norm_type: the p of the p-norm, (sum |x|^p)^(1/p); 0 counts non-zero elements; inf and -inf
            take the largest and the smallest magnitude.
        error_if_nonfinite: raise instead of scaling when the total is NaN or infinite.
        dtype: of the returned norm; by default float32, or float64 when a gradient is float64 or
            complex128.
        eps: added to the total in the coefficient; torch's 1e-6 by default, 0 gives the
            mathematical coefficient.
        scale: a loss scale, > 0: gradients are divided by it in the same pass, and norm and result
            are those of the unscaled gradients.
        grad: the attribute that holds a parameter's gradient.
        **sharding: over ranks: group, reduce, plain, distinct_dims, replicas and check_replicas,
            as `gradclip.sharding.Sharding` describes them. DTensors are clipped over all ranks
            without any of them; every rank must call, whatever it holds.

    Returns:
        The total norm before clipping: a 0-dim tensor on the first gradient's device, without
        autograd history. 0, with a warning, when there is no gradient.

    Raises:
        ValueError: a negative or NaN `max_norm`, a NaN `norm_type`, gradients that overlap.
        TypeError: a gradient that is integer, boolean or quantized.
        RuntimeError: the total is not finite and `error_if_nonfinite` is set; over ranks, what
            any rank found wrong, in the same words on all.
        In every case before any gradient was written.
    """
    try:
        max_norm = arguments.limit(max_norm, "max_norm")
        norm_type, eps = arguments.order(norm_type), arguments.epsilon(eps)
        dtype, loss_scale = arguments.result_dtype(dtype), arguments.loss_scale(scale)
    except (TypeError, ValueError) as refusal:
        tell_all_ranks(refusal, parameters, grad, sharding)
        raise
    if torch.compiler.is_compiling() and not sharding:
        return compiled.clip_(
            parameters, grad, max_norm, norm_type, error_if_nonfinite, dtype, eps, loss_scale
        )
    given = listed(parameters)
    if session := session_for(given, grad, sharding):
        settings = Settings(norm_type, max_norm, eps, loss_scale, error_if_nonfinite)
        return sharded.clip_(session, given, settings, dtype)[0]
    found = gradients.of(given, grad)
    if not found.tensors:
        return no_gradient(given, dtype)
    return clip_found_(found, max_norm, norm_type, error_if_nonfinite, dtype, eps, loss_scale)


def clip_found_(
    found: Gradients,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    dtype: torch.dtype | None,
    eps: float,
    loss_scale: float,
) -> Tensor:
    """`clip_` of gradients that were read, with arguments that were checked."""
    if loss_scale == 1 and (device := engine.on_one_device(found, norm_type)):
        written = device.totals(norm_type, max_norm, eps, loss_scale)
        total_norm = _on_device(found, written, norm_type, error_if_nonfinite, dtype)
        device.scale_by_result_(written)
        engine.written(found)
        return total_norm
    total = totals.unscaled(engine.total(found, norm_type), norm_type, loss_scale)
    result = result_of(found, total, norm_type, error_if_nonfinite, dtype)
    engine.scale_(found, _core.coefficient(total, max_norm, eps) / loss_scale)
    return result


@without_grad
def clip_grad_norm_(
    parameters: ParametersLike,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    **sharding: Unpack[Sharding],
) -> Tensor:
    """`clip_` with the signature of `torch.nn.utils.clip_grad_norm_`.

    `foreach` is accepted and changes nothing: there is one engine.
    """
    return clip_(parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite, **sharding)


@without_grad
def get_total_norm(
    tensors: ParametersLike,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    dtype: torch.dtype | None = None,
    **sharding: Unpack[Sharding],
) -> Tensor:
    """The total norm of tensors (gradients, not parameters), with torch's signature.

    Args, result and errors are those of `clip_`; `foreach` is accepted and changes nothing. The
    returned tensor remembers its float64: `clip_grads_with_norm_` writes what `clip_` would.
    """
    try:
        norm_type, dtype = arguments.order(norm_type), arguments.result_dtype(dtype)
    except (TypeError, ValueError) as refusal:
        tell_all_ranks(refusal, tensors, None, sharding)
        raise
    if torch.compiler.is_compiling() and not sharding:
        return compiled.total_norm(tensors, norm_type, error_if_nonfinite, dtype)
    given = listed(tensors)
    if session := session_for(given, None, sharding):
        settings = Settings(norm_type, error_if_nonfinite=error_if_nonfinite)
        return sharded.total_norm(session, given, settings, dtype)
    found = gradients.given(given)
    if not found.tensors:
        return torch.zeros((), dtype=dtype or torch.float32, device=given.device)
    if device := engine.on_one_device(found, norm_type):
        written = device.totals(norm_type, math.inf, 0.0, 1.0)
        return _on_device(found, written, norm_type, error_if_nonfinite, dtype)
    total = engine.total(found, norm_type)
    return result_of(found, total, norm_type, error_if_nonfinite, dtype)


@without_grad
def clip_grads_with_norm_(
    parameters: ParametersLike,
    max_norm: float,
    total_norm: float | Tensor,
    foreach: bool | None = None,
    *,
    eps: float = 1e-6,
    grad: str = "grad",
    **sharding: Unpack[Sharding],
) -> None:
    """Scales the gradients of parameters by min(1, max_norm / (total_norm + eps)).

    Args:
        parameters: as for `clip_`; parameters, not gradients.
        max_norm: the limit, >= 0; inf never changes a gradient.
        total_norm: the norm of the gradients, >= 0; NaN makes all gradients NaN.
        foreach: accepted, changes nothing.
        eps: as for `clip_`.
        grad: as for `clip_`.
        **sharding: accepted, changes nothing: scaling needs no other rank.

    Raises:
        ValueError: a negative or NaN `max_norm`, a negative `total_norm`.
        TypeError: raw gradients were passed instead of parameters.
    """
    max_norm, eps = arguments.limit(max_norm, "max_norm"), arguments.epsilon(eps)
    refuse_unknown(sharding)
    if torch.compiler.is_compiling():
        return compiled.clip_with_norm_(parameters, grad, max_norm, total_norm, eps)
    total = totals.float64_of(total_norm)
    given = listed(parameters)
    _refuse_raw_gradients(given, grad)
    found = sharded.local_gradients(given, grad)
    engine.scale_(found, totals.coefficient(total, max_norm, eps))
    return None


def result_of(
    found: Gradients,
    total: float,
    norm_type: float,
    error_if_nonfinite: bool,
    dtype: torch.dtype | None,
) -> Tensor:
    """The total as a tensor for the caller; raises RuntimeError if it must be finite and is not."""
    if error_if_nonfinite:
        _refuse_non_finite(total, norm_type)
    return totals.tensor_of(total, dtype or found.total_dtype, found.device)


def _on_device(
    found: Gradients,
    written: Tensor,
    norm_type: float,
    error_if_nonfinite: bool,
    dtype: torch.dtype | None,
) -> Tensor:
    """The same from what the kernels wrote; the host reads it only if it must be finite."""
    if error_if_nonfinite:
        _refuse_non_finite(float(written[0]), norm_type)
    return totals.from_result(written, dtype or found.total_dtype)


def _refuse_non_finite(total: float, norm_type: float) -> None:
    if not math.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped. To disable this error and scale the gradients by the "
            "non-finite norm anyway, set `error_if_nonfinite=False`"
        )


def no_gradient(given: Parameters, dtype: torch.dtype | None) -> Tensor:
    """The total norm of parameters of which none has a gradient: 0, with a warning."""
    if given.tensors:
        warn("no parameter has a gradient: nothing is clipped; call clip_ after backward()")
    return torch.zeros((), dtype=dtype or torch.float32, device=given.device)


def _refuse_raw_gradients(given: Parameters, attribute: str) -> None:
    for position, tensor in enumerate(given.tensors):
        is_parameter = isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad
        if not is_parameter and getattr(tensor, attribute) is None:
            raise TypeError(
                f"{given.name(position)} is a plain tensor without .{attribute}; pass parameters, "
                "or scale raw gradients with gradclip.scale_"
            )
