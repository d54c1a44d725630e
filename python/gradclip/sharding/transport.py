"""How the vector travels: which group, on which device, or through a caller's own hook."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gradclip.sharding import collectives, compat
from gradclip.sharding.agreement import Verdict
from gradclip.sharding.errors import (
    OwnershipError,
    ShardedClipError,
    describe,
    kind_of,
    sharded_error,
)

#: Reduces an int64 vector in place over all ranks; the second argument is "sum" or "max".
Reduce = Callable[[torch.Tensor, str], object]


@dataclass(frozen=True)
class Transport:
    """One way to reduce a vector over the ranks that clip together.

    `rank` is this rank's global rank, or a random stand-in where torch.distributed is not in use;
    `ranks` are the group's; empty where only a hook knows the others. `is_alive` says whether the
    group still exists. `is_hook` marks a caller's `reduce=`, `is_dry` a fake process group, whose
    collectives do nothing: there is nobody to agree with.
    """

    reduce: Reduce
    device: torch.device
    rank: int
    ranks: tuple[int, ...]
    is_alive: Callable[[], bool] = lambda: True
    is_hook: bool = False
    is_dry: bool = False

    @property
    def label(self) -> str:
        """How errors call this rank."""
        return f"rank {self.rank}" if _initialized() else "a rank"

    def sum_(self, vector: torch.Tensor) -> torch.Tensor:
        """The vector summed over ranks, in place when it is on the transport's device."""
        return self._reduced(vector, "sum")

    def max_(self, vector: torch.Tensor) -> torch.Tensor:
        """The vector's element-wise maximum over ranks, in place likewise."""
        return self._reduced(vector, "max")

    def _reduced(self, vector: torch.Tensor, operation: str) -> torch.Tensor:
        carried = vector.to(self.device)
        if self.is_hook:
            _call_hook(self.reduce, carried, operation)
        else:
            self.reduce(carried, operation)
        return carried


def _call_hook(hook: Reduce, vector: torch.Tensor, operation: str) -> None:
    try:
        result = hook(vector, operation)
    except Exception as cause:
        raise hook_error(f"`reduce` raised {describe(cause)}", kind_of(cause)) from cause
    if isinstance(result, torch.Tensor) and result is not vector:
        raise hook_error("`reduce` returned a new tensor")
    wait: Any = getattr(result, "wait", None)
    if callable(wait):
        wait()


def hook_error(what: str, kind: str = "") -> ShardedClipError:
    """The error of a `reduce=` that does not do what it must."""
    return sharded_error(
        f'{what}; `reduce` must reduce the int64 vector in place over all ranks: "sum" adds, "max"'
        " takes the larger of each element, neither averages; no gradient was changed on this rank",
        kind,
    )


def checksum(vector: torch.Tensor) -> torch.Tensor:
    """A number modulo 2^64 that adds up over ranks as the vector does: 0-dim int64."""
    odd = torch.arange(1, 2 * vector.numel(), 2, dtype=torch.int64, device=vector.device)
    return (vector * odd).sum()


def check_hook(verdict: Verdict, maximum: bool, nonce: int, ranks: int, intact: bool) -> None:
    """Check that a `reduce=` did to a first vector what it should; every rank finds the same.

    Args:
        verdict: what the reduced vector says.
        maximum: whether maxima were asked for.
        nonce: the random number that this rank sent.
        ranks: how many ranks take part; 0 if only the hook knows.
        intact: whether the checksum of the vector holds.

    Raises:
        ShardedClipError: the vector is not that sum or maximum.
    """
    if verdict.is_mixed or not intact:
        raise hook_error(
            "ranks disagree about norm_type (±inf or not), or `reduce` does not do what it is asked"
        )
    first, second = verdict.nonces
    alone = first == -second if maximum else verdict.ranks == 1
    between = not -second <= nonce <= first if maximum else alone and first != nonce
    if between:
        raise hook_error("`reduce` gave something between the ranks' values")
    if ranks > 1 and alone:
        raise hook_error(f"`reduce` left out other ranks of the {ranks} in group=")
    if ranks and not maximum and verdict.ranks != ranks:
        raise hook_error(f"`reduce` reduced over {verdict.ranks} ranks; group= has {ranks}")


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
        is_dry="fake" in compat.backends(group).values(),
    )


def max_over(vector: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The element-wise maximum of a CPU vector over a group, on the CPU."""
    carried = vector.to(device_of(group))
    collectives.all_reduce(carried, "max", group)
    return carried.cpu()


def over_hook(hook: Reduce, ranks: Iterable[int], device: torch.device) -> Transport:
    """The transport over a caller's `reduce=`; `device` is where the vector is handed to it."""
    rank = dist.get_rank() if _initialized() else random.SystemRandom().getrandbits(30)
    device = getattr(hook, "device", device)
    return Transport(hook, device, rank, tuple(ranks), is_hook=True)


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
