"""What a placement says about one mesh dimension: unique piece, replica, or pending reduction."""

from __future__ import annotations

from typing import Any

UNIQUE = "unique"
REPLICA = "replica"

#: Reductions that commute with scaling, so that partial values may be scaled in place.
LINEAR_REDUCTIONS = ("sum", "avg")

_unique_names = {"Shard", "_StridedShard", "StridedShard"}


def register_unique_placement(placement: type) -> None:
    """Declare that ranks along a mesh dimension placed so hold different elements.

    For placement classes of other libraries; torch's own are known.
    """
    _unique_names.add(placement.__name__)


def meaning(placement: Any) -> str:
    """What `placement` says of its mesh dimension: unique, replica, partial:sum or partial:avg.

    By class name: torch's strided shard is a subclass of `Shard` in one version and not in
    another, and answers False to every predicate in some.

    Raises:
        ValueError: for a reduction that scaling does not commute with, and for unknown classes.
    """
    name = type(placement).__name__
    if name in _unique_names:
        return UNIQUE
    if name == "Replicate":
        return REPLICA
    if name == "Partial" and placement.reduce_op in LINEAR_REDUCTIONS:
        return f"partial:{placement.reduce_op}"
    if name == "Partial":
        raise ValueError(
            f"placement Partial({placement.reduce_op}) cannot be clipped: only partial sums and"
            " averages may be scaled; redistribute the gradient first"
        )
    raise ValueError(
        f"placement class `{name}` is unknown; gradclip.sharding.register_unique_placement"
        f"({name}) declares that each rank holds its own elements, else redistribute the gradient"
    )
