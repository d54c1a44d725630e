"""What a call would do, in words."""

from typing import NamedTuple

import torch

from gradclip import gradients
from gradclip.parameters import ParametersLike, listed


class Row(NamedTuple):
    """The plan of one gradient."""

    parameter: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    route: str
    reason: str
    chunks: int


class Explanation(NamedTuple):
    """The plan of a list of gradients; prints as a table."""

    rows: list[Row]

    def __str__(self) -> str:
        cells = [[str(cell) for cell in row] for row in (Row._fields, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in cells
        )


def explain(parameters: ParametersLike, *, grad: str = "grad") -> Explanation:
    """The route of each gradient, with its reason; nothing is summed or written.

    Args:
        parameters: as for `gradclip.clip_`.
        grad: as for `gradclip.clip_`.

    Raises:
        ValueError, TypeError: as `gradclip.clip_`.
    """
    found = gradients.of(listed(parameters), grad)
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
    return Explanation(rows)


def _foreign(tensor: torch.Tensor) -> str:
    if tensor.layout != torch.strided:
        return "sparse"
    if tensor.device.type == "meta":
        return "meta"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"subclass {type(tensor).__name__}"
    return f"no engine for {str(tensor.dtype).removeprefix('torch.')}"
