"""Gradients whose sum over a mesh dimension is still pending: reduced into owned pieces.

A norm of a sum needs the sum, so this is the only traffic that grows with the gradients. One
reduce-scatter for each (mesh dimension, dtype) takes all of them together; each rank keeps the
piece that it counts, and the gradients themselves stay as they are (scaling commutes with sums).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradclip.sharding import collectives, compat


class Reduction(NamedTuple):
    """A pending reduction: the mesh dimension, its group, and "sum" or "avg"."""

    dim: int
    group: dist.ProcessGroup
    how: str


@dataclass
class Pending:
    """One local tensor, flat, with the reductions that it still needs."""

    values: torch.Tensor
    reductions: tuple[Reduction, ...]


def reduced_pieces(pending: Sequence[Pending]) -> list[torch.Tensor]:
    """This rank's piece of each sum, in order; mesh dimensions are reduced first to last.

    Every rank of a mesh dimension must bring the same shapes and dtypes in the same order.
    """
    values = [item.values for item in pending]
    for dim in sorted({reduction.dim for item in pending for reduction in item.reductions}):
        for members in _buckets(pending, values, dim):
            first = next(r for r in pending[members[0]].reductions if r.dim == dim)
            pieces = _reduce_scattered([values[k] for k in members], first.group)
            for k, piece in zip(members, pieces, strict=True):
                average = any(r.dim == dim and r.how == "avg" for r in pending[k].reductions)
                values[k] = piece.div_(first.group.size()) if average else piece
    return values


def _buckets(
    pending: Sequence[Pending], values: Sequence[torch.Tensor], dim: int
) -> list[list[int]]:
    """The places that share a group and a dtype, in an order that all ranks share."""
    found: dict[tuple[object, ...], list[int]] = {}
    for k, item in enumerate(pending):
        for reduction in item.reductions:
            if reduction.dim == dim:
                key = compat.group_ranks(reduction.group), str(values[k].dtype)
                found.setdefault((*key, values[k].device.type), []).append(k)
    return [found[key] for key in sorted(found, key=repr)]


def _reduce_scattered(
    values: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Piece `rank` of the sum over `group` of each flat tensor, with one reduce-scatter."""
    size, rank = group.size(), group.rank()
    chunks = [-(-tensor.numel() // size) for tensor in values]
    send = values[0].new_zeros(size, sum(chunks))
    offset = 0
    for tensor, chunk in zip(values, chunks, strict=True):
        for owner in range(size):
            part = tensor[owner * chunk : (owner + 1) * chunk]
            send[owner, offset : offset + part.numel()] = part
        offset += chunk
    received = send.new_empty(sum(chunks))
    collectives.reduce_scatter(received, send.flatten(), group)
    pieces, offset = [], 0
    for tensor, chunk in zip(values, chunks, strict=True):
        kept = max(0, min(chunk, tensor.numel() - rank * chunk))
        pieces.append(received[offset : offset + kept])
        offset += chunk
    return pieces
