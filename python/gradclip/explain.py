"""What a call would do, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gradclip import arguments, entry, gradients
from gradclip.grad_mode import without_grad
from gradclip.gradients import Gradients
from gradclip.option_types import MeshDims, PlainReplicas, Reduce, Replicas
from gradclip.parameters import ParametersLike, listed, warn
from gradclip.sharding import explain as sharded
from gradclip.sharding.options import DISTINCT_DIMS
from gradclip.sharding.session import session_for

if TYPE_CHECKING:
    import torch.distributed as dist
    from typing_extensions import Never


class Row(NamedTuple):
    """The plan of one gradient."""

    parameter: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    route: str
    reason: str
    chunks: int


class Explanation(NamedTuple):
    """The plan of a list of gradients; prints as a table.

    `shares` tells who counts what where gradients are spread over ranks; empty otherwise.
    """

    rows: list[Row]
    shares: list[sharded.ShardedRow]

    def __str__(self) -> str:
        plan = _table(Row._fields, self.rows)
        if not self.shares:
            return plan
        return plan + "\n\n" + _table(sharded.ShardedRow._fields, self.shares)


def _table(fields: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> str:
    cells = [[str(cell) for cell in row] for row in (fields, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


@without_grad
def explain(
    parameters: ParametersLike,
    *,
    grad: str = "grad",
    group: dist.ProcessGroup | None = None,
    reduce: Reduce | None = None,
    plain: PlainReplicas | None = None,
    distinct_dims: MeshDims = DISTINCT_DIMS,
    replicas: Replicas | None = None,
    check_replicas: bool | int | None = None,
    **unknown: Never,
) -> Explanation:
    """The route of each gradient, with its reason; nothing is summed, sent or written.

    Args:
        parameters: as for `gradclip.clip_`.
        grad: as for `gradclip.clip_`.
        group: as for `gradclip.clip_`, like the following; over ranks `shares` says which elements
            this rank counts.
        reduce: as for `gradclip.clip_`.
        plain: as for `gradclip.clip_`.
        distinct_dims: as for `gradclip.clip_`.
        replicas: as for `gradclip.clip_`.
        check_replicas: as for `gradclip.clip_`.
        **unknown: any other keyword is refused, with the nearest one that there is.

    Raises:
        ValueError, TypeError: as `gradclip.clip_`.
    """
    sharding = entry.options(group, reduce, plain, distinct_dims, replicas, check_replicas, unknown)
    if unknown:
        arguments.refuse_unknown("explain", unknown, arguments.names_of(explain))
    given = listed(parameters)
    if given.nothing:
        warn(given.nothing)
    if session := session_for(given, grad, sharding):
        found, shares = sharded.explain(session, given)
        return Explanation(_routes(found), shares)
    return Explanation(_routes(gradients.of(given, grad)), [])


def _routes(found: Gradients) -> list[Row]:
    planned = {
        place: (route, reason, chunks) for place, route, reason, chunks in found.core.describe()
    }
    rows = []
    for place, tensor in enumerate(found.tensors):
        route, reason, chunks = planned.get(place, ("reference", _foreign(tensor), 0))
        if not found.fused:
            route, reason, chunks = "reference", "GRADCLIP_FUSED=0", 0
        name = found.name(place).strip("`")
        rows.append(Row(name, tensor.dtype, tuple(tensor.shape), route, reason, chunks))
    return rows


def _foreign(tensor: torch.Tensor) -> str:
    if tensor.layout != torch.strided:
        return "sparse"
    if tensor.device.type == "meta":
        return "meta"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"subclass {type(tensor).__name__}"
    return f"no engine for {str(tensor.dtype).removeprefix('torch.')}"
