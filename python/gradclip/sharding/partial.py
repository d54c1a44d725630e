"""Gradients whose sum over a mesh dimension is still pending: reduced into owned pieces.

A norm of a sum needs the sum, so this is the only traffic that grows with the gradients. One
reduce-scatter for each (mesh dimension, dtype) takes all of them together; each rank keeps the
piece that it counts, and the gradients themselves stay as they are (scaling commutes with sums).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gradclip.sharding import compat


@dataclass
class Pending:
    """One local tensor, flat, with the reductions that it still needs, first to last."""

    values: torch.Tensor
    reductions: tuple[tuple[dist.ProcessGroup, str], ...]


def reduced_pieces(pending: Sequence[Pending]) -> list[torch.Tensor]:
    """This rank's piece of each sum, in order.

    Every rank of a mesh dimension must bring the same shapes and dtypes in the same order.
    """
    values = [item.values for item in pending]
    rounds = max((len(item.reductions) for item in pending), default=0)
    for number in range(rounds):
        for members in _bucketed(pending, values, number):
            group = pending[members[0]].reductions[number][0]
            pieces = _reduce_scattered([values[k] for k in members], group)
            for k, piece in zip(members, pieces, strict=True):
                average = pending[k].reductions[number][1] == "avg"
                values[k] = piece.div_(group.size()) if average else piece
    return values


def _bucketed(
    pending: Sequence[Pending], values: Sequence[torch.Tensor], number: int
) -> list[list[int]]:
    found: dict[tuple[object, ...], list[int]] = {}
    for k, item in enumerate(pending):
        if number < len(item.reductions):
            ranks = compat.group_ranks(item.reductions[number][0])
            found.setdefault((ranks, str(values[k].dtype), str(values[k].device)), []).append(k)
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
    dist.reduce_scatter_tensor(received, send, group=group)
    pieces, offset = [], 0
    for tensor, chunk in zip(values, chunks, strict=True):
        kept = max(0, min(chunk, tensor.numel() - rank * chunk))
        pieces.append(received[offset : offset + kept])
        offset += chunk
    return pieces
