"""The public functions inside of `torch.func.vmap`: each sample is a list of gradients of its own.

The norm is one operator, whose rule for a batch takes the samples one after the other through the
engines: exact for each. What is written is written by torch operations on the whole batch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch

from gradclip import rounding, totals
from gradclip.parameters import Parameters
from gradclip.settings import Settings

_LIBRARY = torch.library.Library("gradclip", "FRAGMENT")
_LIBRARY.define("exact_norm(Tensor[] tensors, float norm_type) -> Tensor")
_EXACT = "_gradclip_float64"


def gradients_in(given: Parameters, attribute: str | None) -> list[Tensor]:
    """The gradients of a list, each parameter once, if any is of a batch that `vmap` maps over.

    Empty outside of `vmap`, and with a tensor that `torch.func.grad` or `jvp` follows: that is
    refused later, by name.
    """
    if _functorch.peek_interpreter_stack() is None:
        return []
    parameters = {id(tensor): tensor for tensor in given.tensors}.values()
    found = [tensor if attribute is None else getattr(tensor, attribute) for tensor in parameters]
    gradients = [gradient for gradient in found if gradient is not None]
    return gradients if _is_batch(gradients) else []


def _is_batch(tensors: Sequence[object]) -> bool:
    kinds = [_kinds(tensor) for tensor in tensors if isinstance(tensor, Tensor)]
    return any(kinds) and all(kind <= {"batch"} for kind in kinds)


def _kinds(tensor: Tensor) -> set[str]:
    found = set()
    while _functorch.is_functorch_wrapped_tensor(tensor):
        found.add("batch" if _functorch.is_batchedtensor(tensor) else "other")
        tensor = _functorch.get_unwrapped(tensor)
    return found


def norm(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """The total norm of each sample: float64, 0-dim inside of the map."""
    result: Tensor = torch.ops.gradclip.exact_norm(list(tensors), norm_type)
    return result


def total_norm(tensors: Sequence[Tensor], settings: Settings, dtype: torch.dtype | None) -> Tensor:
    """`gradclip.get_total_norm` of a batch."""
    return _outcome(tensors, settings, dtype)[0]


def clip_(gradients: Sequence[Tensor], settings: Settings, dtype: torch.dtype | None) -> Tensor:
    """`gradclip.clip_` of a batch."""
    total, factor = _outcome(gradients, settings, dtype)
    scale_(gradients, factor)
    return total


def clip_with_norm_(
    gradients: Sequence[Tensor], max_norm: float, total_norm: float | Tensor, eps: float
) -> None:
    """`gradclip.clip_grads_with_norm_` of a batch."""
    if not isinstance(total_norm, Tensor):
        total_norm = gradients[0].new_full((), total_norm, dtype=torch.float64)
    shown = total_norm.to(torch.float64)
    exact = getattr(total_norm, _EXACT, shown)
    is_same = rounding.narrowed(exact, total_norm.dtype).to(torch.float64) == shown
    total = torch.where(is_same, exact, shown)
    scale_(gradients, totals.coefficient(total, max_norm, eps))


def scale_(gradients: Sequence[Tensor], factor: float | Tensor) -> None:
    """`gradclip.scale_` of a batch."""
    for gradient in gradients:
        gradient.copy_(_scaled(gradient, factor))


def clamp_(gradients: Sequence[Tensor], limit: float) -> None:
    """`gradclip.clip_grad_value_` of a batch."""
    for gradient in gradients:
        if gradient.is_complex():
            raise TypeError(
                f"a gradient of a sample is {gradient.dtype}, which has no order to clip values "
                "by; use gradclip.clip_"
            )
    for gradient in gradients:
        bound = rounding.rounded(limit, gradient.dtype)
        gradient.copy_(gradient.clamp(-bound, bound))


def each_norm(
    given: Parameters, attribute: str, norm_type: float, dtype: torch.dtype | None
) -> Tensor:
    """`gradclip.grad_norms` of a batch."""
    each = [getattr(parameter, attribute) for parameter in given.tensors]
    found = [gradient for gradient in each if gradient is not None]
    zero = found[0].new_zeros((), dtype=torch.float64)
    norms = [zero if gradient is None else norm([gradient], norm_type) for gradient in each]
    return rounding.narrowed(torch.stack(norms), dtype or _dtype_of(found))


def _outcome(
    gradients: Sequence[Tensor], settings: Settings, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    exact = norm(gradients, settings.norm_type)
    total = exact if settings.norm_type == 0 else exact / settings.scale
    if settings.error_if_nonfinite:
        _refuse_non_finite(total)
    factor = totals.coefficient(total, settings.max_norm, settings.eps)
    result = rounding.narrowed(total, dtype or _dtype_of(gradients))
    result = result.clone() if result is total else result
    setattr(result, _EXACT, total)
    return result, factor / settings.scale  # type: ignore[return-value]


def _refuse_non_finite(total: Tensor) -> None:
    values = total
    while _functorch.is_functorch_wrapped_tensor(values):
        values = _functorch.get_unwrapped(values)
    if not bool(values.isfinite().all()):
        raise RuntimeError(
            "the total norm of a sample is non-finite, so it cannot be clipped; to scale its "
            "gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )


def _scaled(gradient: Tensor, factor: float | Tensor) -> Tensor:
    """As `reference.scale_`, for factors of which some samples' may be 1."""
    if not isinstance(factor, Tensor):
        factor = gradient.new_full((), factor, dtype=torch.float64)
    reals = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    if reals.dtype == torch.float64:
        product = reals * factor
    else:
        product = (reals.to(torch.float32) * factor.to(torch.float32)).to(reals.dtype)
    chosen = torch.where(factor == 1, reals, product)
    return torch.view_as_complex(chosen) if gradient.is_complex() else chosen


def _dtype_of(gradients: Sequence[Tensor]) -> torch.dtype:
    has_double = any(gradient.dtype in totals.DOUBLE for gradient in gradients)
    return torch.float64 if has_double else torch.float32


def _exact_norm(tensors: list[Tensor], norm_type: float) -> Tensor:
    from gradclip import clip

    return clip.get_total_norm(tensors, norm_type, dtype=torch.float64).clone()


def _batch_rule(
    info: Any, in_dims: tuple[Any, ...], tensors: list[Tensor], norm_type: float
) -> tuple[Tensor, int]:
    dims = in_dims[0]
    samples = []
    for place in range(info.batch_size):
        sample = [
            tensor if dim is None else tensor.select(dim, place)
            for tensor, dim in zip(tensors, dims, strict=True)
        ]
        samples.append(norm(sample, norm_type))
    if samples:
        return torch.stack(samples), 0
    return tensors[0].new_zeros(0, dtype=torch.float64), 0


_LIBRARY.impl("exact_norm", _exact_norm, "CompositeExplicitAutograd")
torch.library.register_fake(
    "gradclip::exact_norm",
    lambda tensors, norm_type: tensors[0].new_empty((), dtype=torch.float64),
    lib=_LIBRARY,
)
torch.library.register_vmap("gradclip::exact_norm", _batch_rule, lib=_LIBRARY)
