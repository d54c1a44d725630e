"""What this rank brings to one call: its gradients, and what it says of them in the first exchange.

Whatever fails here is kept as `cause`: this rank still takes part, and every rank raises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gradclip import engine
from gradclip.settings import Settings
from gradclip.sharding import agreement
from gradclip.sharding.agreement import Balance, Balances, Tail
from gradclip.sharding.local import Local, read
from gradclip.sharding.plan import Gathered, Plan
from gradclip.sharding.session import Session

#: Norm types whose first pass is final: no term leaves float64's range.
_SINGLE_PASS = (0.0, 1.0, 2.0, math.inf, -math.inf)
_OFTEN_ZERO = 16


class Request(NamedTuple):
    """What a call asks, on every rank alike."""

    function: str
    settings: Settings

    @property
    def maximum(self) -> bool:
        """Whether norms are reduced by maxima."""
        return agreement.takes_max(self.settings.norm_type)

    def __str__(self) -> str:
        return f"{self.function}({self.settings.words()})"


@dataclass(frozen=True)
class Contribution:
    """One rank's part in one call.

    Attributes:
        session: the list of parameters, and the transport to the other ranks.
        request: what ranks must agree on.
        gathered: the gradients that there are; None when this rank failed before it had any.
        local: the same, read and checked; None when this rank failed.
        tail: what travels beside the sums of the first exchange.
        parameters: those of the plan, in its order.
        compared: positions in `gathered` of the replicas whose contents are compared.
        zeros: those of them that are all zero.
        cause: why this rank failed, if it did.
    """

    session: Session
    request: Request
    gathered: Gathered | None
    local: Local | None
    tail: Tail
    parameters: tuple[torch.Tensor, ...] = ()
    compared: tuple[int, ...] = ()
    zeros: frozenset[int] = frozenset()
    cause: Exception | None = None

    @property
    def plan(self) -> Plan:
        """The plan of the session."""
        return self.session.plan

    def deferrable(self) -> bool:
        """Whether the host has nothing to find out in this call: see `deferred`."""
        return (
            self.local is not None
            and self.gathered is not None
            and self.cause is None
            and not self.gathered.pending
            and not self.gathered.missing
            and not self.compared
            and self.tail.shards_unchecked
            and not (self.request.maximum and self.tail.changed)
            and not self.request.settings.error_if_nonfinite
            and self._takes_one_pass(self.local)
            and bool(self.plan.transport.ranks)
            and not self.plan.transport.is_hook
        )

    def _takes_one_pass(self, local: Local) -> bool:
        """Whether the first sums are final: of powers and of moduli they may not be."""
        norm_type = self.request.settings.norm_type
        is_real = local.gradients.core.first_complex is None
        return norm_type == 2.0 or (is_real and norm_type in _SINGLE_PASS)


def prepare(session: Session, parameters: Sequence[torch.Tensor], request: Request) -> Contribution:
    """This rank's part in a call; `parameters` are the plan's, in its order."""
    try:
        return _prepared(session, parameters, request)
    except Exception as cause:
        return refusal(session, request, cause)


def refusal(session: Session, request: Request, cause: Exception) -> Contribution:
    """The part of a rank that failed."""
    rank = session.plan.transport.rank
    tail = Tail(session.nonce, _tags(session.plan, request), failed=rank + 1)
    return Contribution(session, request, None, None, tail, cause=cause)


def _prepared(
    session: Session, parameters: Sequence[torch.Tensor], request: Request
) -> Contribution:
    plan = session.plan
    gathered = plan.gather(parameters)
    if gathered.cause is not None:
        raise gathered.cause
    local = Local(gathered.entries, gathered.tensors, gathered.owned)
    compared = _replicas_to_compare(session, gathered)
    digests = content_digests(gathered, compared)
    zeros = frozenset(k for k, digest in zip(compared, digests, strict=True) if digest == 0)
    balances = Balances(
        outline=agreement.added((plan.listed, gathered.outline)),
        pending=agreement.added(item.balance() for item in gathered.pending),
        content=content_balance(gathered, compared, digests),
        compared=agreement.added(_marks(gathered, compared)),
    )
    replicas_by_default, shards_by_default = plan.plain_defaults(gathered)
    shards = _shards(session, gathered) if shards_by_default else None
    token, agreed = session.agreed
    lists = plan.list_tags() if request.function == "grad_norms" else (0, 0)
    tail = Tail(
        session.nonce,
        _tags(plan, request),
        token=token,
        listed=lists,
        shards=shards or (0, 0),
        comparing=bool(compared),
        plain_replicas=replicas_by_default,
        plain_shards=shards_by_default,
        shards_unchecked=shards is None,
        double=local.double,
        pending=bool(gathered.pending),
        changed=balances[:2] != (agreed if token else Balances()[:2]),
        balances=Balances() if plan.transport.is_dry else balances,
    )
    return Contribution(
        session, request, gathered, local, tail, tuple(parameters), tuple(compared), zeros
    )


def _tags(plan: Plan, request: Request) -> tuple[int, ...]:
    """The tags of `agreement.SUBJECTS`."""
    asked, rules = request.settings, plan.rules
    plain = rules.plain if isinstance(rules.plain, (str, int, type(None))) else "ranks"
    distinct = [dim if isinstance(dim, str) else "mesh" for dim in rules.distinct_dims]
    every = None if rules.check_replicas is None else int(rules.check_replicas)
    return (
        agreement.tag(request.function),
        agreement.tag(asked.norm_type),
        agreement.tag(asked.max_norm, asked.eps, asked.scale, asked.error_if_nonfinite),
        agreement.tag(plan.transport.ranks, every, plain, distinct),
    )


def _replicas_to_compare(session: Session, gathered: Gathered) -> list[int]:
    """Positions of the replicas whose contents are compared in this call."""
    if session.schedule.every is False or session.plan.transport.is_dry:
        return []
    if session.schedule.compares_all():
        return gathered.replicas
    fresh = session.plan.fresh
    if not fresh:
        return []
    return [k for k in gathered.replicas if _is_due(fresh.get(gathered.entries[k]))]


def _is_due(uses: int | None) -> bool:
    """Whether a fresh replica is compared; less often once it has been zero for some time."""
    return uses is not None and (uses < _OFTEN_ZERO or uses % _OFTEN_ZERO == 0)


def content_digests(gathered: Gathered, positions: Sequence[int]) -> list[int]:
    """The digests of whole local tensors."""
    if not positions:
        return []
    entries = [gathered.entries[k] for k in positions]
    whole = read(entries, [gathered.tensors[k] for k in positions], [None] * len(positions))
    digests = zip(whole.tensors, engine.digests(whole), strict=True)
    found = {id(tensor): digest for tensor, digest in digests}  # one listed twice is read once
    return [found[id(gathered.tensors[k])] for k in positions]


def content_balance(
    gathered: Gathered, positions: Sequence[int], digests: Sequence[int]
) -> Balance:
    """This rank's share of the balance of replicas' contents."""
    return agreement.added(share for _, share in content_shares(gathered, positions, digests))


def content_shares(
    gathered: Gathered, positions: Sequence[int], digests: Sequence[int]
) -> list[tuple[str, Balance]]:
    """The same for each replica, by its label."""
    return [
        (replica.label, replica.share(digest))
        for k, digest in zip(positions, digests, strict=True)
        if (replica := gathered.entries[k].replica) is not None
    ]


def _marks(gathered: Gathered, compared: Sequence[int]) -> list[Balance]:
    """Shares that balance if the same replicas are compared on all ranks."""
    replicas = (gathered.entries[k].replica for k in compared)
    return [replica.share("compared") for replica in replicas if replica is not None]


def _shards(session: Session, gathered: Gathered) -> tuple[int, int] | None:
    """Tags of all plain shards and their contents; None where they are not to be compared.

    Shards that are the same on all ranks are replicas that nobody declared. A list with a gradient
    that is all zero tells nothing.
    """
    if session.shards_compared or not gathered.tensors or session.plan.transport.is_dry:
        return None
    positions = range(len(gathered.tensors))
    digests = content_digests(gathered, positions)
    if not all(digests):
        return None
    outlines = [(str(tensor.dtype), tuple(tensor.shape)) for tensor in gathered.tensors]
    return agreement.wide_tag(outlines, digests)
