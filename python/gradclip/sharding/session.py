"""From a caller's arguments to a session: which ranks, which transport, which plan.

Sessions are kept between calls, so that a second call of the same model decides nothing anew. They
hold no parameter alive, nor the group, and check that identities are not reused.
"""

from __future__ import annotations

import random
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradclip.parameters import Parameters
from gradclip.sharding import options, transport
from gradclip.sharding.agreement import NONCE_BITS, Balance, Tail, Verdict
from gradclip.sharding.compat import group_ranks
from gradclip.sharding.deferred import Deferred
from gradclip.sharding.options import Rules, Sharding
from gradclip.sharding.plan import Gathered, Plan, layouts_of
from gradclip.sharding.replicas import Schedule

_KEPT_SESSIONS = 16
_SHARDS_COMPARED = 8


class Session:
    """A list of parameters that is clipped over ranks again and again.

    Args:
        given: the parameters; one that is listed twice counts once.
        way: how vectors are reduced.
        rules: the caller's options.
        attribute: where gradients are found; None for raw gradients.

    Attributes:
        nonce: a random number that tells this session from others.
        agreed: the sum of all ranks' nonces at the last SUM exchange in which the lists agreed, 0
            before; and this rank's balances of outlines and pending sums in it.
        schedule: when the contents of replicas are compared.
        shards_compared: whether plain shards were compared with those of other ranks.
    """

    def __init__(
        self, given: Parameters, way: transport.Transport, rules: Rules, attribute: str | None
    ) -> None:
        names: Sequence[str | None] = given.names or [None] * len(given.tensors)
        named = zip(names, given.tensors, strict=True)
        once = list({id(parameter): (name, parameter) for name, parameter in named}.values())
        self.plan = Plan(once, way, rules, attribute)
        self.references = [weakref.ref(parameter) for _, parameter in once]
        self.deferred = Deferred()
        self.nonce = random.SystemRandom().getrandbits(NONCE_BITS)
        self.agreed: tuple[int, tuple[Balance, ...]] = (0, ())
        self.schedule = Schedule(rules.check_replicas)
        self.shards_compared = False
        self._shard_uses = 0

    def alive(self) -> bool:
        """Whether group and parameters still exist, so that their identities mean what they did.

        Raw gradients need not: they are known by their layouts.
        """
        lasting = () if self.plan.attribute is None else self.references
        return self.plan.transport.is_alive() and all(there() is not None for there in lasting)

    def note_agreement(self, verdict: Verdict, tail: Tail) -> None:
        """Remember what a SUM exchange agreed on, for maxima that cannot carry it."""
        agrees = verdict.outline_agrees and verdict.pending_agrees
        self.agreed = (verdict.nonces[0], tail.balances[:2]) if agrees else (0, ())

    def advance(
        self,
        gathered: Gathered,
        compared: Sequence[int],
        zeros: frozenset[int],
        verdict: Verdict,
    ) -> None:
        """Count a good use: which replicas are known to be equal, and when to compare again."""
        self._shard_uses += 1
        self.shards_compared = verdict.all_shards_compared or self._shard_uses >= _SHARDS_COMPARED
        if verdict.comparing and not verdict.compared_agrees:
            self.schedule.restart()
            return
        fresh, verified = self.plan.fresh, False
        if fresh:
            not_zero = {gathered.entries[k] for k in compared if k not in zeros}
            for entry in [gathered.entries[k] for k in gathered.replicas]:
                if entry in fresh and entry in not_zero:
                    del fresh[entry]
                    verified = True
                elif entry in fresh:
                    fresh[entry] += 1
        self.schedule.advance(verified)


def unique(given: Parameters) -> list[torch.Tensor]:
    """The tensors of a list, one that is listed twice once."""
    return list({id(tensor): tensor for tensor in given.tensors}.values())


def open_session(given: Parameters, attribute: str | None, sharding: Sharding) -> Session | None:
    """A new session for this list of parameters; None when nothing is sharded.

    Raises:
        OwnershipError: DTensors whose root leaves out ranks of the world, without `group=`.
        TypeError, ValueError: an option with an unknown value.
    """
    options.refuse_wrong(sharding, given)
    way = transport_of(given, sharding.get("group"), sharding.get("reduce"))
    if way is None:
        options.warn_unshared(sharding)
        return None
    return Session(given, way, options.rules_of(sharding), attribute)


def session_of_refusal(given: Parameters, sharding: Mapping[str, Any]) -> Session | None:
    """A session that only carries a refusal, whatever else the caller asked.

    Args:
        given: the tensors that could be read.
        sharding: the options as they were passed.

    Returns:
        None where nothing tells which ranks take part.
    """
    group, reduce = sharding.get("group"), sharding.get("reduce")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        return None
    try:
        way = transport_of(given, group, reduce if callable(reduce) else None)
    except Exception:
        return None
    return None if way is None else Session(Parameters.of(()), way, Rules(), None)


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
    return None if session is None else _kept(key, session)


def _key(given: Parameters, attribute: str | None, sharding: Sharding) -> Any:
    """What makes a list of tensors the same as one before.

    Parameters are known by identity. Raw gradients are new objects at every step: their layouts,
    in order, stand for them.
    """
    names = None if given.names is None else tuple(given.names)
    identities = tuple(map(id, given.tensors))
    which = identities if attribute is not None else tuple(map(_layout_key, given.tensors))
    return (which, len(set(identities)), names), _options_key(attribute, sharding)


def _options_key(attribute: str | None, sharding: Sharding) -> Any:
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


def transport_of(
    given: Parameters, group: dist.ProcessGroup | None, reduce: transport.Reduce | None
) -> transport.Transport | None:
    """How to reduce over ranks; None when these tensors are local to this process."""
    if group is None and reduce is None and given.are_plain:
        return None
    roots = [frozenset(layout.root) for layout in layouts_of(given.tensors)]
    if group is None and roots:
        group = transport.covering_group(roots)
    if reduce is not None:
        ranks = () if group is None else group_ranks(group)
        return transport.over_hook(reduce, ranks, given.device)
    return None if group is None else transport.over_group(group)


def _identity(value: Any) -> Any:
    """What stands for an option in a key: strings and numbers as they are, objects by identity.

    The session keeps these objects alive, or knows that the group is gone, so an identity is not
    reused while its key is good.
    """
    if isinstance(value, (str, int, type(None))):
        return value
    if isinstance(value, torch.Tensor):
        return id(value)
    if isinstance(value, Mapping):
        return tuple((_identity(key), _identity(item)) for key, item in value.items())
    if isinstance(value, (list, tuple, range)):
        return tuple(map(_identity, value))
    return id(value)
