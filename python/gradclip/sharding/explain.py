"""Who counts what, in words: the sharded part of `gradclip.explain`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gradclip.gradients import Gradients
from gradclip.parameters import Parameters
from gradclip.sharding.local import read
from gradclip.sharding.session import Session


class ShardedRow(NamedTuple):
    """What this rank does with one gradient."""

    parameter: str
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    placements: str
    copies: str
    counted: str
    reason: str


def explain(session: Session, given: Parameters) -> tuple[Gradients, list[ShardedRow]]:
    """This rank's gradients, and a row for each; nothing is sent, summed or written.

    Raises:
        ValueError: the first gradient whose copies cannot be told.
    """
    unique = list({id(tensor): tensor for tensor in given.tensors}.values())
    found = session.plan.gather(unique)
    if found.cause is not None:
        raise found.cause
    rows = []
    for entry, local in zip(found.entries, found.tensors, strict=True):
        share = entry.share
        assert share is not None
        start, stop = share.slice(local.numel())
        rows.append(
            ShardedRow(
                entry.label.strip("`"),
                local.dtype,
                tuple(local.shape),
                "plain" if entry.spec is None else ", ".join(map(str, entry.spec.placements)),
                f"{share.index + 1} of {share.count}" if share.count else "elsewhere",
                "its reduced piece" if share.partial else f"{start}:{stop} of {local.numel()}",
                share.reason,
            )
        )
    return read(found.entries, found.tensors, found.owned), rows
