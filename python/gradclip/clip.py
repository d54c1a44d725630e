"""Clipping by the total norm: torch's functions, on exact sums."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradclip import _core, arguments, batched, compiled, engine, gradients, refusals, totals
from gradclip.grad_mode import without_grad
from gradclip.gradients import Gradients
from gradclip.parameters import Parameters, ParametersLike, listed, warn
from gradclip.settings import Settings
from gradclip.sharding import clip as sharded
from gradclip.sharding.refused import entered, tell_all_ranks
from gradclip.sharding.session import Sharding, refuse_unknown

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
    value for p in {0, 1, 2, inf, -inf} (but for p = 1 of complex gradients, whose magnitudes are
    rounded first), so its bits depend on nothing but the elements. Gradients are multiplied by
    min(1, max_norm / (total + eps)); nothing is written when that is 1.

    Args:
        parameters: a Module, a tensor, an iterable of tensors (walked once), or of (name, tensor)
            pairs, which make errors name the parameter. Gradients may be float16, bfloat16,
            float32, float64, float8, complex32, complex64 or complex128, in any mix, of any shape,
            strided or sparse COO. A parameter listed twice counts once. What a sparse gradient
            lists more than once for an index counts as its exact sum, rounded once to float64; the
            list stays as it is, each value scaled. A wrapper subclass counts its outer elements.
        max_norm: the limit, >= 0; inf never changes a gradient.
        norm_type: the p of the p-norm, (sum |x|^p)^(1/p); 0 counts non-zero elements; inf and -inf
            take the largest and the smallest magnitude (0 of no elements). A NaN element makes
            every norm NaN. Below |p| = 1/4096 two non-zero elements overflow: inf, or 0 for p < 0.
        error_if_nonfinite: raise instead of scaling when the float64 total is NaN or infinite.
        dtype: of the returned norm, to which the float64 total is rounded once; by default
            float32, or float64 when a gradient is float64 or complex128.
        eps: added to the total in the coefficient; torch's 1e-6 by default, 0 gives the
            mathematical coefficient.
        scale: a loss scale, from 2**-126 to 2**126: gradients are divided by it in the same pass,
            and norm and result are those of the unscaled gradients: the exact norm, rounded, over
            the scale.
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
        settings = arguments.settings(norm_type, max_norm, eps, scale, error_if_nonfinite)
        dtype = arguments.result_dtype(dtype)
    except (TypeError, ValueError) as refusal:
        tell_all_ranks(refusal, parameters, grad, sharding)
        raise
    if torch.compiler.is_compiling() and not sharding:
        return compiled.clip_(parameters, grad, settings, dtype)
    given, session = entered(parameters, grad, sharding)
    if session is not None:
        return sharded.clip_(session, given, settings, dtype)[0]
    if samples := batched.gradients_in(given, grad):
        return batched.clip_(samples, settings, dtype)
    found = gradients.of(given, grad)
    return clip_found_(found, settings, dtype) if found.tensors else no_gradient(given, dtype)


def clip_found_(found: Gradients, settings: Settings, dtype: torch.dtype | None) -> Tensor:
    """`clip_` of gradients that were read, with arguments that were checked."""
    if device := engine.on_one_device(found, settings):
        written = device.totals(settings)
        total_norm = _on_device(found, written, settings, dtype)
        device.scale_by_result_(written)
        engine.written(found)
        return total_norm
    total_norm, factor = total_and_factor(found, settings, dtype)
    engine.scale_(found, factor)
    return total_norm


def total_and_factor(
    found: Gradients, settings: Settings, dtype: torch.dtype | None
) -> tuple[Tensor, float]:
    """The total norm for the caller, and what gradients are to be multiplied by.

    Raises:
        RuntimeError: the total must be finite and is not.
    """
    exact = engine.total(found, settings.norm_type)
    total, _, factor = _core.clip_outcome(
        exact, settings.norm_type, settings.max_norm, settings.eps, settings.scale
    )
    _refuse_non_finite(total, settings, found)
    return totals.tensor_of(total, dtype or found.total_dtype, found.device), factor


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
        settings = Settings(arguments.order(norm_type), error_if_nonfinite=error_if_nonfinite)
        dtype = arguments.result_dtype(dtype)
        refusals.refuse_module(tensors, "measured")
    except (TypeError, ValueError) as refusal:
        tell_all_ranks(refusal, tensors, None, sharding)
        raise
    if torch.compiler.is_compiling() and not sharding:
        return compiled.total_norm(tensors, settings, dtype)
    given, session = entered(tensors, None, sharding)
    if session is not None:
        return sharded.total_norm(session, given, settings, dtype)
    if samples := batched.gradients_in(given, None):
        return batched.total_norm(samples, settings, dtype)
    found = gradients.given(given)
    if not found.tensors:
        return torch.zeros((), dtype=dtype or torch.float32, device=given.device)
    if device := engine.on_one_device(found, settings):
        return _on_device(found, device.totals(settings), settings, dtype)
    return total_and_factor(found, settings, dtype)[0]


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
    given = listed(parameters)
    refuse_raw_gradients(given, grad)
    if samples := batched.gradients_in(given, grad):
        return batched.clip_with_norm_(samples, max_norm, total_norm, eps)
    total = totals.float64_of(total_norm)
    found = sharded.local_gradients(given, grad)
    refusals.check_value(total_norm, "total_norm", found.tensors)
    engine.scale_(found, totals.coefficient(total, max_norm, eps))
    return None


def _on_device(
    found: Gradients, written: Tensor, settings: Settings, dtype: torch.dtype | None
) -> Tensor:
    """The total from what the kernels wrote; the host reads it only if it must be finite."""
    if settings.error_if_nonfinite:
        _refuse_non_finite(float(totals.total_in(written)), settings, found)
    return totals.from_result(written, dtype or found.total_dtype)


def _refuse_non_finite(total: float, settings: Settings, found: Gradients) -> None:
    if settings.error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {settings.norm_type} for gradients from `parameters` is "
            f"non-finite, so it cannot be clipped{_culprit(found)}. To disable this error and "
            "scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )


def _culprit(found: Gradients) -> str:
    """The first gradient that is not finite; a sum of finite ones may be too large, too."""
    for place, sums in enumerate(engine.sums_each(found, math.inf)):
        norm = sums.total(math.inf)
        if norm is not None and not math.isfinite(norm):
            kind = "NaN" if math.isnan(norm) else "an infinity"
            return f": the gradient of {found.name(place)} holds {kind}"
    return ""


def no_gradient(given: Parameters, dtype: torch.dtype | None) -> Tensor:
    """The total norm of parameters of which none has a gradient: 0, with a warning."""
    if given.tensors:
        warn(
            "no parameter has a gradient: nothing is clipped; call clip_ after backward(), and "
            "pass parameters rather than gradients"
        )
    return torch.zeros((), dtype=dtype or torch.float32, device=given.device)


def refuse_raw_gradients(given: Parameters, attribute: str) -> None:
    """Raises TypeError where gradients stand for parameters: they have none of their own."""
    for position, tensor in enumerate(given.tensors):
        is_parameter = isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad
        if not is_parameter and getattr(tensor, attribute, None) is None:
            raise TypeError(
                f"{given.name(position)} is a plain tensor without .{attribute}; pass parameters, "
                "or scale raw gradients with gradclip.scale_"
            )
