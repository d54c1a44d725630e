"""The options about ranks that every clipping function takes, and their checks.

A refusal names the argument, its value and the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
import torch.distributed as dist

from gradclip import arguments
from gradclip.describe import described
from gradclip.parameters import Parameters, warn
from gradclip.sharding import compat
from gradclip.sharding.transport import Reduce

#: Dimensions of the root mesh along which ranks hold other tensors, by default: pipeline stages.
DISTINCT_DIMS = ("pp",)

#: What `replicas=` may be: who holds replicas of a parameter, by name, by parameter, or by a rule.
Replicas = Mapping[Any, Any] | Callable[[str | None, torch.Tensor], Any]


class Sharding(TypedDict, total=False):
    """The options about ranks that every clipping function takes.

    group: the process group whose ranks clip together. By default the world, when there are
        DTensors (whose roots must cover it); without DTensors nothing is shared by default.
    reduce: a callable (int64 vector, "sum" or "max") that reduces the vector in place over all
        ranks, instead of the group's all_reduce.
    plain: who holds replicas of plain tensors: "replicated" (all ranks of the stage; the default
        beside DTensors and for a DistributedDataParallel module), "distinct" (nobody else; the
        default without DTensors), or the ranks, as a list, a process group or a mesh.
    distinct_dims: dimensions of the root mesh, by name or as a mesh, along which ranks hold other
        tensors rather than replicas of those whose mesh lacks the dimension; ("pp",) by default.
    replicas: overrides for single parameters, as a mapping from names or parameters or a callable
        of (name, parameter) that returns None where the rules hold: what `plain=` takes, or
        "elsewhere" for a replica that other ranks count. For a DTensor it is about replicas outside
        of its own mesh.
    check_replicas: when the contents of replicas are compared: True at every call, a number n at
        every n-th, False never; by default when they are first seen non-zero, at the 2nd, 4th, 8th,
        ... use and then at every 1,024th.
    """

    group: dist.ProcessGroup | None
    reduce: Reduce | None
    plain: Any
    distinct_dims: Sequence[Any]
    replicas: Replicas | None
    check_replicas: bool | int | None


@dataclass
class Rules:
    """Replication as the caller declares it, overriding placements."""

    plain: Any = None
    distinct_dims: tuple[Any, ...] = DISTINCT_DIMS
    replicas: Replicas | None = None
    check_replicas: bool | int | None = None

    def option_of(self, name: str | None, parameter: torch.Tensor) -> Any:
        """What `replicas=` holds for this parameter; None where the rules hold."""
        if self.replicas is None:
            return None
        if callable(self.replicas):
            return self.replicas(name, parameter)
        if name is not None and name in self.replicas:
            return self.replicas[name]
        return next((value for key, value in self.replicas.items() if key is parameter), None)


def rules_of(sharding: Sharding) -> Rules:
    """The rules that options which were checked come to."""
    return Rules(
        plain=sharding.get("plain"),
        distinct_dims=dims_of(sharding.get("distinct_dims", DISTINCT_DIMS)),
        replicas=sharding.get("replicas"),
        check_replicas=sharding.get("check_replicas"),
    )


_RANKS = "the ranks that hold copies: a process group, a mesh or a list of global ranks"
_OF_ALL = ("replicated", "distinct")
_OF_ONE = (*_OF_ALL, "elsewhere")


def refuse_wrong(said: Mapping[str, Any], given: Parameters) -> None:
    """Refuse arguments about ranks that mean nothing.

    Names in `distinct_dims=` may be of no mesh: a run may do without a dimension, and a stage may
    have none. One that is misspelt shows when copies are compared.

    Raises:
        TypeError: a value of a wrong type.
        ValueError: a word that there is not, or a parameter of `replicas=` that is not listed.
    """
    _refuse_group(said.get("group"))
    reduce, check = said.get("reduce"), said.get("check_replicas")
    if reduce is not None and not callable(reduce):
        raise TypeError(
            f'`reduce` is {reduce!r}; expected a callable (int64 vector, "sum" or "max") that'
            " reduces the vector in place over all ranks"
        )
    if check is not None and (not isinstance(check, int) or (check < 1 and check is not False)):
        raise TypeError(
            f"`check_replicas` is {check!r:.80}; expected True, False, None, or n >= 1 for every"
            " n-th call"
        )
    if (plain := said.get("plain")) is not None:
        refuse_copies(plain, "`plain` is", _OF_ALL)
    _refuse_dims(said.get("distinct_dims", ()))
    _refuse_replicas(said.get("replicas"), given)


def _refuse_group(group: Any) -> None:
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"`group` is {group!r}; expected a torch.distributed process group that this rank is"
            " in, such as mesh.get_group()"
        )


def refuse_copies(said: Any, subject: str, words: tuple[str, ...] = _OF_ONE) -> None:
    """Refuse what does not tell who holds copies; `subject` begins the error, with its verb.

    Raises:
        TypeError: neither a word nor ranks.
        ValueError: another word than these.
    """
    if isinstance(said, str) and said in words:
        return
    ranks = listed_ranks(said)
    if ranks is None or not all(type(rank) is int for rank in ranks):
        kind = ValueError if isinstance(said, str) else TypeError
        named = ", ".join(f'"{word}"' for word in words)
        raise kind(f"{subject} {said!r}; expected {named}, or {_RANKS}")


def listed_ranks(said: Any) -> tuple[int, ...] | None:
    """The global ranks that `said` lists, or that its group or mesh has; None if it is neither."""
    if isinstance(said, dist.ProcessGroup):
        return compat.group_ranks(said)
    if is_mesh(said):
        return compat.mesh_ranks(said)
    if isinstance(said, (list, tuple, range, set, frozenset)):
        return tuple(said)
    return None


def is_mesh(said: Any) -> bool:
    """Whether `said` is a DeviceMesh."""
    return hasattr(said, "mesh_dim_names")


def dims_of(said: Any) -> tuple[Any, ...]:
    """`distinct_dims=` as a tuple: a single name or mesh may stand for itself."""
    return (said,) if isinstance(said, str) or is_mesh(said) else tuple(said)


def _refuse_dims(said: Any) -> None:
    is_sequence = isinstance(said, (str, list, tuple, set, frozenset)) or is_mesh(said)
    if not is_sequence or not all(isinstance(dim, str) or is_mesh(dim) for dim in dims_of(said)):
        raise TypeError(
            f"`distinct_dims` is {said!r}; expected names of mesh dimensions, or meshes over them,"
            ' such as ("pp",)'
        )


def _refuse_replicas(said: Any, given: Parameters) -> None:
    if said is None or callable(said):
        return
    if not isinstance(said, Mapping):
        raise TypeError(
            f"`replicas` is {said!r}; expected a mapping from names or parameters, or a callable"
            " (name, parameter) that returns None where it has nothing to say"
        )
    known = {*(given.names or ()), *map(id, given.tensors)}
    for key, copies in said.items():
        is_tensor = isinstance(key, torch.Tensor)
        subject = f"`replicas` of {'a parameter' if is_tensor else repr(key)} is"
        refuse_copies(copies, subject)
        if given.tensors and (id(key) if is_tensor else key) not in known:
            raise ValueError(_unlisted(key, given))


def _unlisted(key: object, given: Parameters) -> str:
    named = "a parameter" if isinstance(key, torch.Tensor) else described(key)
    if isinstance(key, str) and given.names is None:
        return (
            f"`replicas` holds {named}, but the parameters have no names; pass a Module or (name,"
            " parameter) pairs"
        )
    near = arguments.suggestion(key, given.names or ()) if isinstance(key, str) else ""
    return f"`replicas` holds {named}, which is not listed{near or '; leave it out'}"


def warn_unshared(said: Mapping[str, Any]) -> None:
    """Warn that words about ranks change nothing, where there are other ranks."""
    told = [name for name, value in said.items() if value is not None]
    if told and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        warn(
            f"`{told[0]}` is said of gradients that are clipped on each rank alone: without"
            " DTensors nothing is shared; pass group=, such as torch.distributed.group.WORLD"
        )
