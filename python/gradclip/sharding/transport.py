"""How the vector travels: which group, on which device, or through a caller's own hook."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gradclip.sharding import collectives, compat
from gradclip.sharding.ownership import OwnershipError

#: Reduces an int64 vector in place over all ranks; the second argument is "sum" or "max".
Reduce = Callable[[torch.Tensor, str], object]


@dataclass(frozen=True)
class Transport:
    """One way to reduce a vector over the ranks that clip together.

    `rank` is this rank's global rank, or a random stand-in where torch.distributed is not in use;
    `ranks` are the group's; empty where only a hook knows the others. `is_alive` says whether the
    group still exists.
    """

    reduce: Reduce
    device: torch.device
    rank: int
    ranks: tuple[int, ...]
    is_alive: Callable[[], bool] = lambda: True

    @property
    def label(self) -> str:
        """How errors call this rank."""
        return f"rank {self.rank}" if _initialized() else "a rank"

    def is_like(self, other: Transport) -> bool:
        """Whether both reduce over the same ranks in the same way."""
        same_ranks = bool(self.ranks) and (self.ranks, self.device) == (other.ranks, other.device)
        return self.reduce is other.reduce or same_ranks

    def sum_(self, vector: torch.Tensor) -> torch.Tensor:
        """The vector summed over ranks, in place when it is on the transport's device."""
        return self._reduced(vector, "sum")

    def max_(self, vector: torch.Tensor) -> torch.Tensor:
        """The vector's element-wise maximum over ranks, in place likewise."""
        return self._reduced(vector, "max")

    def _reduced(self, vector: torch.Tensor, operation: str) -> torch.Tensor:
        carried = vector.to(self.device)
        self.reduce(carried, operation)
        return carried


def over_group(group: dist.ProcessGroup) -> Transport:
    """The transport over a torch process group: `all_reduce`, nothing else.

    It does not keep the group alive: to destroy a group must close its connections.
    """
    there = weakref.ref(group)

    def reduce(vector: torch.Tensor, operation: str) -> None:
        group = there()
        if group is None:
            raise RuntimeError("the process group was destroyed; make a new Clipper with a new one")
        if group.size() > 1:
            collectives.all_reduce(vector, operation, group)

    return Transport(
        reduce,
        device_of(group),
        dist.get_rank(),
        compat.group_ranks(group),
        lambda: there() is not None,
    )


def over_hook(hook: Reduce, ranks: Iterable[int], device: torch.device) -> Transport:
    """The transport over a caller's `reduce=`; `device` is where the vector is handed to it."""
    rank = dist.get_rank() if _initialized() else random.SystemRandom().getrandbits(30)
    return Transport(hook, getattr(hook, "device", device), rank, tuple(ranks))


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where a vector must be for `group` to reduce it: the same answer on all of its ranks.

    It depends on the group alone, never on this rank's gradients: a rank may have none, or have
    them offloaded to the CPU under an NCCL group. gloo takes CPU vectors without a copy.
    """
    by_type = compat.backends(group)
    elsewhere = [kind for kind, backend in by_type.items() if kind != "cpu" and backend != "gloo"]
    for kind in elsewhere:
        module = getattr(torch, kind, None)
        if module is not None and hasattr(module, "is_available") and module.is_available():
            return torch.device(kind, module.current_device())
    return torch.device("cpu")


def covering_group(root_ranks: Iterable[frozenset[int]]) -> dist.ProcessGroup:
    """The group that the root meshes of the gradients cover, when no `group=` was given.

    Raises:
        OwnershipError: when the roots cover less than the world: whether the other ranks take
            part, and with which tensors, only the caller knows.
    """
    world = dist.group.WORLD
    if world is None:
        raise OwnershipError("gradients are DTensors, but torch.distributed is not initialized")
    everyone = frozenset(compat.group_ranks(world))
    for ranks in root_ranks:
        if not everyone <= ranks:
            raise OwnershipError(
                f"a gradient's mesh has a root over ranks {sorted(ranks)} of a world of"
                f" {len(everyone)}: pass group=mesh.get_group() to clip over that mesh alone, or"
                " group=torch.distributed.group.WORLD with replicas= saying which ranks hold copies"
            )
    return world
