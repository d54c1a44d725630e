"""From a caller's arguments to a session: which ranks, which transport, which plan.

Sessions are kept between calls, so that a second call of the same model decides nothing anew. They
hold no parameter alive, nor the group, and check that identities are not reused.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch
import torch.distributed as dist

from gradclip.parameters import Parameters
from gradclip.sharding import transport, words
from gradclip.sharding.compat import group_ranks
from gradclip.sharding.deferred import Deferred
from gradclip.sharding.ownership import OwnershipError
from gradclip.sharding.plan import Plan, Replicas, Rules, layouts_of
from gradclip.sharding.slots import Slots

_KEPT_SESSIONS = 16


class Sharding(TypedDict, total=False):
    """The arguments about ranks that every clipping function takes.

    group: the process group whose ranks clip together. By default the world, when there are
        DTensors (whose roots must cover it); without DTensors nothing is shared by default.
    reduce: a callable (int64 vector, "sum" or "max") that reduces the vector in place over all
        ranks, instead of the group's all_reduce.
    plain: who holds copies of plain tensors: "replicated" (all ranks of the stage; the default
        beside DTensors), "distinct" (nobody else; the default without DTensors), or the ranks,
        as a list, a process group or a mesh.
    distinct_dims: dimensions of the root mesh, by name or as a mesh, along which ranks hold other
        tensors rather than copies of those whose mesh lacks the dimension; ("pp",) by default.
    replicas: overrides for single parameters, as a mapping from names or parameters or a callable
        of (name, parameter) that returns None where it has nothing to say: what `plain=` takes, or
        "elsewhere" for a copy that other ranks count. For a DTensor it is about copies outside of
        its own mesh.
    check_replicas: True compares copies at every call, False never; by default the first time
        that a gradient is seen.
    """

    group: dist.ProcessGroup | None
    reduce: transport.Reduce | None
    plain: Any
    distinct_dims: Sequence[Any]
    replicas: Replicas | None
    check_replicas: bool | None


class Session:
    """A list of parameters that is clipped over ranks again and again.

    Args:
        given: the parameters; one that is listed twice counts once.
        way: how vectors are reduced.
        rules: what the caller says of copies.
        attribute: where gradients are found; None for raw gradients.
    """

    def __init__(
        self, given: Parameters, way: transport.Transport, rules: Rules, attribute: str | None
    ) -> None:
        names: Sequence[str | None] = given.names or [None] * len(given.tensors)
        named = zip(names, given.tensors, strict=True)
        once = list({id(parameter): (name, parameter) for name, parameter in named}.values())
        self.plan = Plan(once, way, rules, attribute)
        self.references = [weakref.ref(parameter) for _, parameter in once]
        self.slots: Slots | None = None
        self.deferred = Deferred()

    def alive(self) -> bool:
        """Whether group and parameters still exist, so that their identities mean what they did.

        Raw gradients need not: they are known by their layouts.
        """
        lasting = () if self.plan.attribute is None else self.references
        return self.plan.transport.is_alive() and all(there() is not None for there in lasting)

    def parameters(self) -> Parameters:
        """Those of them that still exist."""
        return Parameters.of(
            [tensor for there in self.references if (tensor := there()) is not None]
        )


def unique(given: Parameters) -> list[torch.Tensor]:
    """The tensors of a list, one that is listed twice once."""
    return list({id(tensor): tensor for tensor in given.tensors}.values())


def open_session(given: Parameters, attribute: str | None, sharding: Sharding) -> Session | None:
    """A new session for this list of parameters; None when nothing is sharded.

    Raises:
        OwnershipError: DTensors whose root leaves out ranks of the world, without `group=`.
        TypeError, ValueError: an argument that there is not, or that means nothing.
    """
    refuse_unknown(sharding)
    words.refuse_wrong(sharding, given)
    way = way_of(given, sharding.get("group"), sharding.get("reduce"))
    if way is None:
        words.warn_unshared(sharding)
        return None
    return Session(given, way, _rules(sharding), attribute)


def open_apart(given: Parameters, attribute: str | None, sharding: Sharding) -> Session | None:
    """A session that only carries a refusal, whatever else the caller said.

    None where nobody can tell which ranks take part.
    """
    group: Any = sharding.get("group")
    reduce: Any = sharding.get("reduce")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        return None
    try:
        way = way_of(given, group, reduce if callable(reduce) else None)
    except OwnershipError:
        return None
    return None if way is None else Session(given, way, Rules(), attribute)


def known_like(apart: Session, given: Parameters, is_whole: bool = True) -> Session | None:
    """The latest kept session over the same ranks of these parameters, or with these among others.

    It holds what other ranks expect of this one: which sums are pending, and how many travel. Of
    raw gradients there is none, as they do not last.
    """
    if apart.plan.attribute is None:
        return None
    wanted = list(map(id, unique(given)))
    for session in reversed(_sessions.values()):
        lasts = session.plan.attribute is not None and session.alive()
        if lasts and session.plan.transport.is_like(apart.plan.transport):
            held = list(map(id, session.parameters().tensors))
            if wanted == held if is_whole else set(wanted) <= set(held):
                return session
    return None


def session_for(given: Parameters, attribute: str | None, sharding: Sharding) -> Session | None:
    """The session of this list of parameters that was kept, or a new one, as `open_session`."""
    if not sharding and given.are_plain:
        return None
    key = _key(given, attribute, sharding)
    known = _sessions.get(key)
    if known is not None and known.alive():
        _sessions.move_to_end(key)
        return known
    session = open_session(given, attribute, sharding)
    if session is None:
        return None
    session.slots = _agreed_before(session, given)
    return _kept(key, session)


def _agreed_before(session: Session, given: Parameters) -> Slots | None:
    """The slots of these parameters under another attribute or other words.

    Where one rank alone says those by mistake, the others send vectors of the slots that they have.
    """
    before = known_like(session, given)
    stages = session.plan.rules.distinct_dims
    return before.slots if before and before.plan.rules.distinct_dims == stages else None


def _key(given: Parameters, attribute: str | None, sharding: Sharding) -> Any:
    """What makes a list of tensors the same as one before.

    Parameters are known by identity. Raw gradients are new objects at every step: their layouts,
    in order, stand for them.
    """
    names = None if given.names is None else tuple(given.names)
    identities = tuple(map(id, given.tensors))
    which = identities if attribute is not None else tuple(map(_layout_key, given.tensors))
    return (which, len(set(identities)), names), _said_key(attribute, sharding)


def _said_key(attribute: str | None, sharding: Sharding) -> Any:
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return attribute, id(world), _identity(sharding)


def _layout_key(tensor: Any) -> Any:
    return getattr(tensor, "_spec", None) or (tensor.shape, tensor.dtype)


_sessions: OrderedDict[Any, Session] = OrderedDict()


def _kept(key: Any, session: Session) -> Session:
    _sessions[key] = session
    while len(_sessions) > _KEPT_SESSIONS:
        _sessions.popitem(last=False)
    return session


def refuse_unknown(sharding: Sharding) -> None:
    """Refuse arguments that there are not, as Python would without `**sharding`.

    Raises:
        TypeError: naming the argument.
    """
    unknown = sorted(set(sharding) - set(Sharding.__annotations__))
    if unknown:
        raise TypeError(
            f"unknown argument `{unknown[0]}`; about ranks there are"
            f" {', '.join(Sharding.__annotations__)}"
        )


def _rules(sharding: Sharding) -> Rules:
    distinct = sharding.get("distinct_dims", ("pp",))
    return Rules(
        plain=sharding.get("plain"),
        distinct_dims=words.dims_of(distinct),
        replicas=sharding.get("replicas"),
        check_replicas=sharding.get("check_replicas"),
    )


def way_of(
    given: Parameters, group: dist.ProcessGroup | None, reduce: transport.Reduce | None
) -> transport.Transport | None:
    """How to reduce over ranks; None when these tensors are this process's own affair."""
    if group is None and reduce is None and given.are_plain:
        return None
    roots = [frozenset(layout.root) for layout in layouts_of(given.tensors)]
    if group is None and roots:
        group = transport.covering_group(roots)
    if reduce is not None:
        ranks = () if group is None else group_ranks(group)
        return transport.over_hook(reduce, ranks, given.device)
    return None if group is None else transport.over_group(group)


def _identity(said: Any) -> Any:
    """What stands for an argument in a key: words as they are, objects by identity.

    The session keeps these objects alive, or knows that the group is gone, so an identity is not
    reused while its key is good.
    """
    if isinstance(said, (str, int, type(None))):
        return said
    if isinstance(said, torch.Tensor):
        return id(said)
    if isinstance(said, Mapping):
        return tuple((_identity(key), _identity(value)) for key, value in said.items())
    if isinstance(said, (list, tuple, range)):
        return tuple(map(_identity, said))
    return id(said)
