"""Gradients spread over ranks: who counts what, and the one collective that sums it.

From the bottom up: `copies` and `placements` tell who holds what, `ownership` which elements a rank
counts, `plan` keeps that for a list of parameters. `message` is the vector, `transport` reduces it,
`verification` compares copies in it, `partial` reduces pending sums before it. `contribution` is
what one rank brings, `exchange` the rounds that carry it, `failure` how all ranks raise the same,
`deferred` the same on a device that nobody waits for. `session` finds the plan of a call.
"""

from gradclip.sharding.failure import ShardedClipError
from gradclip.sharding.ownership import Ownership, OwnershipError
from gradclip.sharding.placements import register_unique_placement
from gradclip.sharding.session import Sharding

__all__ = [
    "Ownership",
    "OwnershipError",
    "ShardedClipError",
    "Sharding",
    "register_unique_placement",
]
