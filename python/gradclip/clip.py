"""Clipping by the total norm: torch's functions, on exact sums."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradclip import (
    _core,
    arguments,
    batched,
    compiled,
    engine,
    entry,
    gradients,
    notices,
    refusals,
    totals,
)
from gradclip.grad_mode import without_grad
from gradclip.gradients import Gradients
from gradclip.nonfinite import describe_nonfinite
from gradclip.option_types import MeshDims, NormType, Number, PlainReplicas, Reduce, Replicas
from gradclip.parameters import Parameters, ParametersLike, listed, warn
from gradclip.settings import Settings
from gradclip.sharding import clip as sharded
from gradclip.sharding.options import DISTINCT_DIMS, Sharding

if TYPE_CHECKING:
    import torch.distributed as dist
    from typing_extensions import Never


@without_grad
def clip_(
    parameters: ParametersLike,
    max_norm: Number,
    norm_type: NormType = 2.0,
    *,
    error_if_nonfinite: bool = False,
    dtype: torch.dtype | None = None,
    eps: Number = 1e-6,
    scale: Number | None = None,
    grad: str = "grad",
    group: dist.ProcessGroup | None = None,
    reduce: Reduce | None = None,
    plain: PlainReplicas | None = None,
    distinct_dims: MeshDims = DISTINCT_DIMS,
    replicas: Replicas | None = None,
    check_replicas: bool | int | None = None,
    **unknown: Never,
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
        group: the process group whose ranks clip together. By default the world, when there are
            DTensors (whose roots must cover it); without DTensors every rank clips alone. Every
            rank of the group must call, whatever it holds.
        reduce: a callable (int64 vector, "sum" or "max") that reduces the vector in place over all
            ranks, instead of the group's all_reduce.
        plain: who holds replicas of plain tensors: "replicated" (all ranks of the stage; the
            default beside DTensors and for a DistributedDataParallel module), "distinct" (nobody
            else; the default without DTensors), or the ranks, as a list, a process group or a mesh.
        distinct_dims: dimensions of the root mesh, by name or as a mesh, along which ranks hold
            other tensors rather than replicas of those whose mesh lacks the dimension.
        replicas: overrides of `plain` for single parameters, as a mapping from names or parameters
            or a callable (name, parameter); also "elsewhere", for a replica that other ranks count.
        check_replicas: when the contents of replicas are compared: True at every call, n at every
            n-th, False never; by default when first seen non-zero, at the 2nd, 4th, 8th, ... use
            and then at every 1,024th.
        **unknown: any other keyword is refused, with the nearest one that there is.

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
    sharding = entry.options(group, reduce, plain, distinct_dims, replicas, check_replicas, unknown)
    numbers = (norm_type, max_norm, eps, scale)
    return clip_call_(parameters, grad, numbers, error_if_nonfinite, dtype, False, sharding)


def clip_call_(
    parameters: ParametersLike,
    grad: str,
    numbers: tuple[NormType, Number, Number, Number | None],
    error_if_nonfinite: bool,
    dtype: torch.dtype | None,
    like_torch: bool,
    sharding: Sharding,
) -> Tensor:
    """`clip_` and `clip_grad_norm_`, which differ in what they warn of.

    `numbers` are norm_type, max_norm, eps and scale, as `arguments.settings` takes them.
    """
    if torch.compiler.is_compiling():
        return compiled.clip_(
            parameters, grad, numbers, error_if_nonfinite, dtype, like_torch, sharding
        )

    def check() -> Settings:
        arguments.result_dtype(dtype)
        return arguments.settings(*numbers, error_if_nonfinite)

    function = "clip_grad_norm_" if like_torch else "clip_"
    given, session, settings = entry.enter(function, parameters, grad, sharding, check)
    if warning := notices.of_empty(parameters, given, like_torch):
        warn(warning)
    if session is not None:
        return sharded.clip_(session, given, settings, dtype)[0]
    if samples := batched.gradients_in(given, grad):
        return batched.clip_(samples, settings, dtype)
    found = gradients.of(given, grad)
    if found.tensors:
        return clip_found_(found, settings, dtype)
    return no_gradient(given, dtype, like_torch)


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
    max_norm: Number,
    norm_type: NormType = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    reduce: Reduce | None = None,
    plain: PlainReplicas | None = None,
    distinct_dims: MeshDims = DISTINCT_DIMS,
    replicas: Replicas | None = None,
    check_replicas: bool | int | None = None,
    **unknown: Never,
) -> Tensor:
    """`clip_` with the signature of `torch.nn.utils.clip_grad_norm_`.

    `foreach` is accepted and changes nothing: there is one engine. It warns where torch does: of an
    empty generator alone.
    """
    sharding = entry.options(group, reduce, plain, distinct_dims, replicas, check_replicas, unknown)
    numbers = (norm_type, max_norm, 1e-6, None)
    return clip_call_(parameters, "grad", numbers, error_if_nonfinite, None, True, sharding)


@without_grad
def get_total_norm(
    tensors: ParametersLike,
    norm_type: NormType = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
    reduce: Reduce | None = None,
    plain: PlainReplicas | None = None,
    distinct_dims: MeshDims = DISTINCT_DIMS,
    replicas: Replicas | None = None,
    check_replicas: bool | int | None = None,
    **unknown: Never,
) -> Tensor:
    """The total norm of tensors (gradients, not parameters), with torch's signature.

    Args, result and errors are those of `clip_`; `foreach` is accepted and changes nothing. The
    returned tensor remembers its float64: `clip_grads_with_norm_` writes what `clip_` would.
    """
    sharding = entry.options(group, reduce, plain, distinct_dims, replicas, check_replicas, unknown)
    if torch.compiler.is_compiling():
        return compiled.total_norm(tensors, norm_type, error_if_nonfinite, dtype, sharding)

    def check() -> Settings:
        arguments.result_dtype(dtype)
        refusals.refuse_module(tensors, "measured")
        return Settings(arguments.order(norm_type), error_if_nonfinite=bool(error_if_nonfinite))

    given, session, settings = entry.enter("get_total_norm", tensors, None, sharding, check)
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
    max_norm: Number,
    total_norm: Number,
    foreach: bool | None = None,
    *,
    eps: Number = 1e-6,
    grad: str = "grad",
    group: dist.ProcessGroup | None = None,
    reduce: Reduce | None = None,
    plain: PlainReplicas | None = None,
    distinct_dims: MeshDims = DISTINCT_DIMS,
    replicas: Replicas | None = None,
    check_replicas: bool | int | None = None,
    **unknown: Never,
) -> None:
    """Scales the gradients of parameters by min(1, max_norm / (total_norm + eps)).

    Args:
        parameters: as for `clip_`; parameters, not gradients.
        max_norm: the limit, >= 0; inf never changes a gradient.
        total_norm: the norm of the gradients, >= 0; NaN makes all gradients NaN.
        foreach: accepted, changes nothing.
        eps: as for `clip_`.
        grad: as for `clip_`.
        group: accepted like the other options about ranks, which change nothing: scaling needs no
            other rank.
        reduce: as `group`.
        plain: as `group`.
        distinct_dims: as `group`.
        replicas: as `group`.
        check_replicas: as `group`.
        **unknown: any other keyword is refused, with the nearest one that there is.

    Raises:
        ValueError: a negative or NaN `max_norm`, a negative `total_norm`.
        TypeError: raw gradients were passed instead of parameters.
    """
    if unknown:
        known = arguments.names_of(clip_grads_with_norm_)
        arguments.refuse_unknown("clip_grads_with_norm_", unknown, known)
    if torch.compiler.is_compiling():
        return compiled.clip_with_norm_(parameters, grad, max_norm, total_norm, eps)
    max_norm, eps = arguments.limit(max_norm, "max_norm"), arguments.epsilon(eps)
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
        described = describe_nonfinite(found)
        raise RuntimeError(
            f"The total norm of order {settings.norm_type} for gradients from `parameters` is "
            f"non-finite, so it cannot be clipped{f': {described}' if described else ''}. To "
            "disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )


def no_gradient(
    given: Parameters, dtype: torch.dtype | None, like_torch: bool = False, remedy: str = ""
) -> Tensor:
    """The total norm of parameters of which none has a gradient: 0, with a warning."""
    if warning := notices.of_no_gradient(given, like_torch):
        warn(warning + remedy)
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
