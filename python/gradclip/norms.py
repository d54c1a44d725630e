"""One norm for each parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradclip import arguments, batched, engine, gradients, rounding
from gradclip.grad_mode import without_grad
from gradclip.gradients import Gradients
from gradclip.parameters import ParametersLike
from gradclip.sharding import clip as sharded
from gradclip.sharding.refused import entered, tell_all_ranks
from gradclip.sharding.session import Sharding

if TYPE_CHECKING:
    from typing_extensions import Unpack


@without_grad
def grad_norms(
    parameters: ParametersLike,
    norm_type: float = 2.0,
    *,
    dtype: torch.dtype | None = None,
    grad: str = "grad",
    **sharding: Unpack[Sharding],
) -> Tensor:
    """The norm of each parameter's gradient, in one pass over all of them.

    Args:
        parameters: as for `gradclip.clip_`.
        norm_type: as for `gradclip.clip_`.
        dtype: as for `gradclip.clip_`.
        grad: as for `gradclip.clip_`.

    Returns:
        A 1-dim tensor, one norm a parameter in the order given, on the first gradient's device; 0
        for a parameter without a gradient.

    Raises:
        ValueError, TypeError: as `gradclip.clip_`.
    """
    try:
        norm_type, dtype = arguments.order(norm_type), arguments.result_dtype(dtype)
    except (TypeError, ValueError) as refusal:
        tell_all_ranks(refusal, parameters, grad, sharding, each=True)
        raise
    given, session = entered(parameters, grad, sharding, each=True)
    if session is not None:
        return sharded.each_norm(session, given, norm_type, dtype)
    if batched.gradients_in(given, grad):
        return batched.each_norm(given, grad, norm_type, dtype)
    found = gradients.of(given, grad)
    by_id = {
        id(given.tensors[position]): norm
        for position, norm in zip(found.core.positions, _each(found, norm_type), strict=True)
    }
    norms = [by_id.get(id(parameter), 0.0) for parameter in given.tensors]
    device = found.device if found.tensors else given.device
    return rounding.tensor_of(norms, dtype or found.total_dtype, device)


def _each(found: Gradients, norm_type: float) -> list[float]:
    norms = [sums.total(norm_type) for sums in engine.sums_each(found, norm_type)]
    return [
        engine.total(found.only(place), norm_type) if norm is None else norm
        for place, norm in enumerate(norms)
    ]
