"""Gradients spread over ranks: who counts what, and the one collective that sums it.

`ownership` decides which elements a rank counts, `message` is the vector that is reduced,
`transport` reduces it, `failure` makes every rank raise the same words, `verification` compares
copies, `partial` reduces pending sums first, and `plan` ties them to a list of parameters.
"""

from gradclip.sharding.failure import ShardedClipError
from gradclip.sharding.ownership import Ownership, OwnershipError
from gradclip.sharding.placements import register_unique_placement

__all__ = ["Ownership", "OwnershipError", "ShardedClipError", "register_unique_placement"]
