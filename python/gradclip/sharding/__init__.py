"""Gradients spread over ranks: who counts what, and the one collective that sums it.

From the bottom up: `copies` and `placements` know who holds what, `ownership` which elements a rank
counts, `plan` keeps that for a list of parameters. `transport` reduces vectors, `agreement` is what
travels beside the sums, `replicas` compares replicas in it, `pending` reduces pending sums.
`contribution` is what one rank brings, `exchange` the rounds that carry it, `raising` how all ranks
raise the same, `deferred` the same on a device that nobody waits for, `per_parameter` one norm for
each parameter. `session` finds the plan of a call.
"""

from gradclip.sharding.errors import OwnershipError, ShardedClipError
from gradclip.sharding.options import Sharding
from gradclip.sharding.ownership import Ownership
from gradclip.sharding.placements import register_unique_placement

__all__ = [
    "Ownership",
    "OwnershipError",
    "ShardedClipError",
    "Sharding",
    "register_unique_placement",
]
