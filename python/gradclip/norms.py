"""One norm for each parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradclip import arguments, batched, compiled, engine, entry, gradients, rounding
from gradclip.grad_mode import without_grad
from gradclip.gradients import Gradients
from gradclip.option_types import MeshDims, NormType, PlainReplicas, Reduce, Replicas
from gradclip.parameters import ParametersLike, warn
from gradclip.sharding import clip as sharded
from gradclip.sharding.options import DISTINCT_DIMS

if TYPE_CHECKING:
    import torch.distributed as dist
    from typing_extensions import Never


@without_grad
def grad_norms(
    parameters: ParametersLike,
    norm_type: NormType = 2.0,
    *,
    dtype: torch.dtype | None = None,
    grad: str = "grad",
    group: dist.ProcessGroup | None = None,
    reduce: Reduce | None = None,
    plain: PlainReplicas | None = None,
    distinct_dims: MeshDims = DISTINCT_DIMS,
    replicas: Replicas | None = None,
    check_replicas: bool | int | None = None,
    **unknown: Never,
) -> Tensor:
    """The norm of each parameter's gradient, in one pass over all of them.

    Args:
        parameters: as for `gradclip.clip_`.
        norm_type: as for `gradclip.clip_`.
        dtype: as for `gradclip.clip_`.
        grad: as for `gradclip.clip_`.
        group: as for `gradclip.clip_`; like the following.
        reduce: as for `gradclip.clip_`.
        plain: as for `gradclip.clip_`.
        distinct_dims: as for `gradclip.clip_`.
        replicas: as for `gradclip.clip_`.
        check_replicas: as for `gradclip.clip_`.
        **unknown: any other keyword is refused, with the nearest one that there is.

    Returns:
        A 1-dim tensor on the first gradient's device: one norm for each entry of the list, in its
        order, which for a Module is that of `named_parameters()`. An entry that is listed twice
        stands twice. 0 also stands for a parameter without a gradient, of which only
        `parameter.grad is None` tells it from a gradient of zeros. With names:

            norms = gradclip.grad_norms(model).tolist()
            by_name = {
                name: norm
                for (name, parameter), norm in zip(model.named_parameters(), norms, strict=True)
                if parameter.grad is not None
            }

    Raises:
        ValueError, TypeError: as `gradclip.clip_`.
    """
    sharding = entry.options(group, reduce, plain, distinct_dims, replicas, check_replicas, unknown)
    if torch.compiler.is_compiling():
        return compiled.grad_norms(parameters, grad, norm_type, dtype, sharding)

    def check() -> float:
        arguments.result_dtype(dtype)
        return arguments.order(norm_type)

    given, session, p = entry.enter("grad_norms", parameters, grad, sharding, check)
    if given.nothing:
        warn(given.nothing)
    if session is not None:
        return sharded.each_norm(session, given, p, dtype)
    if batched.gradients_in(given, grad):
        return batched.each_norm(given, grad, p, dtype)
    found = gradients.of(given, grad)
    norm_of = by_id(found, p)
    norms = [norm_of.get(id(parameter), 0.0) for parameter in given.tensors]
    device = found.device if found.tensors else given.device
    return rounding.tensor_of(norms, dtype or found.total_dtype, device)


def by_id(found: Gradients, norm_type: float) -> dict[int, float]:
    """The norm of each gradient, by the identity of the tensor that was listed for it."""
    listed = found.parameters.tensors
    norms = zip(found.core.positions, _each(found, norm_type), strict=True)
    return {id(listed[position]): norm for position, norm in norms}


def _each(found: Gradients, norm_type: float) -> list[float]:
    norms = [sums.total(norm_type) for sums in engine.sums_each(found, norm_type)]
    return [
        engine.total(found.only(place), norm_type) if norm is None else norm
        for place, norm in enumerate(norms)
    ]
