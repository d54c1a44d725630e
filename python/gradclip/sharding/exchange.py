"""One clip over ranks: the rounds that every rank takes part in, and what each may raise.

The first round is the only one of a good clip without pending gradients. It says what every rank is
about to do before any traffic whose size depends on it. Further rounds follow only from what the
reduced vector says, which is the same on every rank: nobody waits for a round that others skip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from gradclip._core import PowerScale, Sums, leading_norm_type
from gradclip.sharding import agreement, pending, raising, replicas, transport
from gradclip.sharding.agreement import Balance, Verdict
from gradclip.sharding.contribution import Contribution, content_digests, content_shares
from gradclip.sharding.errors import UNCHANGED, ShardedClipError, describe
from gradclip.sharding.local import Local, Pieces
from gradclip.sharding.ownership import DISTINCT, remedy
from gradclip.sharding.pending import PendingGradient
from gradclip.sharding.plan import Gathered

T = TypeVar("T")
Rows = list[list[int]]
#: The sums that a rank brings to a round, for one norm type and the scale of each row.
Summed = Callable[[float, Sequence[PowerScale | None]], Rows]


@dataclass(frozen=True)
class Outcome:
    """What a first exchange came to when nothing failed.

    Attributes:
        sums: the sums over all ranks, without pending gradients.
        double: whether any rank has float64 gradients.
        same_list: whether all ranks list the same parameters.
        pieces: this rank's reduced pieces of pending gradients; None where no rank has any.
        deferred: whether the host of some rank reads this later and takes part in no more rounds.
    """

    sums: Sums
    double: bool
    same_list: bool
    pieces: Pieces | None
    deferred: bool


def total(mine: Contribution) -> tuple[float, Outcome]:
    """The total norm over all ranks, in float64.

    Raises:
        ShardedClipError: on every rank alike.
    """
    norm_type = mine.request.settings.norm_type
    outcome = agree(mine, lambda local: local.sums(norm_type).to_list())
    pieces = outcome.pieces
    first = outcome.sums
    if pieces is not None:
        (of_pieces,) = further_round(
            mine, 1, lambda: [pieces.read().sums(norm_type).to_list()], mine.request.maximum
        )
        first = first.merged(of_pieces)

    def summed(p: float, scales: Sequence[PowerScale | None]) -> Rows:
        assert mine.local is not None, "a rank that failed has raised"
        sums = mine.local.sums(p, scales[0])
        if pieces is not None:
            sums = sums.merged(pieces.read().sums(p, scales[0]))
        return [sums.to_list()]

    (norm,) = finished(mine, [first], summed, outcome)
    return norm, outcome


def agree(mine: Contribution, sums: Callable[[Local], list[int]]) -> Outcome:
    """The first exchange, with one row of sums, and the reduction of pending gradients.

    Raises:
        ShardedClipError: on every rank alike.
    """
    row, mine = _first_row(mine, sums)
    maximum = mine.request.maximum
    verdict, reduced = _reduced(mine, agreement.compose(_tensor([row]), mine.tail, maximum))
    judged = _judge(mine, verdict)
    pieces = _reduced_pieces(mine, judged) if judged.pending else None
    return Outcome(reduced, verdict.double, verdict.same_list, pieces, verdict.deferred)


def give_up(mine: Contribution) -> None:
    """Send that this rank failed in an earlier call, so that no other rank waits for it."""
    tail = replace(mine.tail, deferred=True)
    vector = agreement.compose(_tensor([agreement.nothing()]), tail, mine.request.maximum)
    way = mine.plan.transport
    _ = way.max_(vector) if mine.request.maximum else way.sum_(vector)


def _first_row(
    mine: Contribution, sums: Callable[[Local], list[int]]
) -> tuple[list[int], Contribution]:
    """This rank's sums; of no elements when it failed, or fails now."""
    if mine.local is None:
        return agreement.nothing(), mine
    try:
        return sums(mine.local), mine
    except Exception as cause:
        failed = replace(mine.tail, failed=mine.plan.transport.rank + 1)
        return agreement.nothing(), replace(mine, tail=failed, cause=cause)


def _reduced(mine: Contribution, vector: torch.Tensor) -> tuple[Verdict, Sums]:
    """The verdict and the sums over all ranks."""
    way, maximum = mine.plan.transport, mine.request.maximum
    if way.is_hook:
        vector = torch.cat([vector, transport.checksum(vector).reshape(1)])
    reduced = (way.max_(vector) if maximum else way.sum_(vector)).cpu()
    if way.is_hook:
        intact = maximum or bool(transport.checksum(reduced[:-1]) == reduced[-1])
        reduced = reduced[:-1]
    sums, tail = agreement.split(reduced, maximum)
    verdict = agreement.read(tail.tolist(), maximum)
    if way.is_hook:
        transport.check_hook(verdict, maximum, mine.tail.nonce, len(way.ranks), intact)
    return verdict, Sums.from_list(sums[0].tolist())


def _judge(mine: Contribution, verdict: Verdict) -> Verdict:
    """Raise on every rank, or on none; returns the verdict with the balances."""
    way, cause, maximum = mine.plan.transport, mine.cause, mine.request.maximum
    if verdict.deferred and verdict.needs_rounds:
        raising.raise_from_verdict(verdict, cause, way.label)
    if verdict.failures:
        raising.raise_failure(way, cause)
    if verdict.disagreements:
        raising.raise_disagreement(way, verdict.disagreements, _description(mine, verdict))
    if verdict.same_shards:
        raising.raise_agreed(way, _same_shards(mine), "")
    assert mine.gathered is not None, "a rank that failed has raised"
    if maximum and verdict.deferred:
        return verdict
    if maximum and (verdict.changed or verdict.comparing):
        verdict = _sum_round(mine)
    if not verdict.outline_agrees or (verdict.compared_agrees and not verdict.content_agrees):
        _compare_by_name(mine, mine.gathered)
    mine.session.advance(mine.gathered, mine.compared, mine.zeros, verdict)
    if verdict.ranks:
        mine.session.note_agreement(verdict, mine.tail)
    return verdict


def _sum_round(mine: Contribution) -> Verdict:
    """The balances, which need a sum, beside the maxima of a norm of type ±inf."""
    vector = agreement.compose(_tensor([agreement.nothing()]), mine.tail, False)
    _, tail = agreement.split(mine.plan.transport.sum_(vector).cpu(), False)
    return agreement.read(tail.tolist(), False)


def _description(mine: Contribution, verdict: Verdict) -> str:
    """How a disagreement speaks of this rank's call."""
    if mine.cause is not None:
        return f"has {describe(mine.cause)}"
    if agreement.SUBJECTS[0] in verdict.disagreements:
        return f"calls {mine.request}"
    return f"has {mine.request.settings.words()}"


def _same_shards(mine: Contribution) -> str:
    several = "gradients are the same" if len(mine.plan.entries) > 1 else "gradient is the same"
    return (
        f"the {several} on all ranks, and `plain` does not say what that means; pass"
        ' plain="replicated" when every rank holds all of it, as after DistributedDataParallel, or'
        ' plain="distinct" when each rank holds a shard of its own'
    )


def _compare_by_name(mine: Contribution, gathered: Gathered) -> None:
    """Compare all outlines and contents once more, sorted by label, and raise which differ."""
    way, plan = mine.plan.transport, mine.plan
    held = [gathered.entries[k] for k in gathered.replicas]

    def contents() -> list[tuple[str, Balance]]:
        digests = content_digests(gathered, gathered.replicas)
        return content_shares(gathered, gathered.replicas, digests)

    shares = (
        [(entry.label, entry.listed) for entry in plan.entries],
        [(entry.label, entry.outline) for entry in held],
        _guarded(mine, contents),
    )
    vector = torch.cat([replicas.buckets(share) for share in shares])
    listed, outlines, content = way.sum_(vector).cpu().view(3, -1)
    message = None
    if not replicas.agree(listed):
        labels = replicas.suspects([entry.label for entry in plan.entries], listed)
        message = _listed_differently(labels, plan.attribute is None) if labels else None
    elif not (replicas.agree(outlines) and replicas.agree(content)):
        bad = content if replicas.agree(outlines) else outlines
        labels = replicas.suspects([entry.label for entry in held], bad)
        message = _differing(labels) if labels else None
    else:
        return
    raising.raise_agreed(way, message, "ranks list different parameters")


def _listed_differently(labels: Sequence[str], are_gradients: bool) -> str:
    missing = "; of a gradient that one rank does not have, pass the parameter to clip_ instead"
    return (
        f"{replicas.names(labels)} is not listed alike on all ranks that hold it; list the same"
        " parameters, in the same order, with the same names, global shapes, dtypes and placements,"
        " on all ranks of a stage; if a mesh lacks the dimension of pipeline stages, name that in"
        f" distinct_dims= (a name or a mesh){missing if are_gradients else ''}"
    )


def _differing(labels: Sequence[str]) -> str:
    return (
        f"copies of {replicas.names(labels)} differ between the ranks that should hold equal ones;"
        ' if each rank has its own tensor (hand-made expert parallelism), pass plain="distinct", or'
        f" {remedy(labels[0], DISTINCT)}; if its mesh lacks the dimension of pipeline stages, name"
        " that in distinct_dims= (a name or a mesh); else reduce the gradients before clipping"
    )


def _reduced_pieces(mine: Contribution, verdict: Verdict) -> Pieces:
    """This rank's pieces of the pending gradients of all ranks."""
    gathered, plan = mine.gathered, mine.plan
    assert gathered is not None, "a rank that failed has raised"
    items: Sequence[PendingGradient] = gathered.pending
    if not verdict.pending_agrees:
        items = _guarded(
            mine,
            lambda: pending.resolve(
                plan.entries, mine.parameters, gathered.pending, gathered.missing, plan.around
            ),
        )
    values = pending.reduced_pieces(items)
    by_identity = {entry.identity: entry for entry in plan.entries}
    entries = [by_identity[item.identity] for item in items]
    owned = [item.ownership.slice(piece.numel()) for item, piece in zip(items, values, strict=True)]
    return Pieces(entries, values, owned)


def finished(
    mine: Contribution, sums: Sequence[Sums], summed: Summed, outcome: Outcome
) -> list[float]:
    """Norms from sums over all ranks.

    Terms that left float64's range take two more rounds: the extremes, then scaled sums.
    """
    norm_type = mine.request.settings.norm_type
    norms = [one.total(norm_type) for one in sums]
    if all(norm is not None for norm in norms):
        return [norm for norm in norms if norm is not None]
    if outcome.deferred:
        raise ShardedClipError(
            "terms of the norm left float64's range on some rank, and other ranks do not wait for"
            f" the second pass that this takes; call again; {UNCHANGED}"
        )
    count, unscaled = len(norms), [None] * len(norms)
    leading = leading_norm_type(norm_type)
    extremes = further_round(mine, count, lambda: summed(leading, unscaled), maximum=True)
    scales = [
        extreme.scale(norm_type) if norm is None else None
        for extreme, norm in zip(extremes, norms, strict=True)
    ]
    again = further_round(mine, count, lambda: summed(norm_type, scales), maximum=False)
    scaled = [one.total(norm_type, scale) for one, scale in zip(again, scales, strict=True)]
    return [
        norm if norm is not None else other or 0.0
        for norm, other in zip(norms, scaled, strict=True)
    ]


def further_round(
    mine: Contribution, count: int, rows: Callable[[], Rows], maximum: bool
) -> list[Sums]:
    """`count` rows of sums over all ranks; a rank that fails now makes all ranks raise."""
    way, cause = mine.plan.transport, None
    try:
        made = rows()
    except Exception as error:
        made, cause = [agreement.nothing()] * count, error
    vector = torch.cat([_tensor(made).reshape(-1), _tensor([[int(cause is not None)]])[0]])
    if not maximum:
        vector[agreement.EXTREME : -1 : agreement.SUMS] = 0
    reduced = (way.max_(vector) if maximum else way.sum_(vector)).cpu()
    if int(reduced[-1]):
        raising.raise_failure(way, cause)
    sums = reduced[:-1].view(count, agreement.SUMS)
    if not maximum:
        sums[:, agreement.EXTREME] = agreement.NO_ELEMENT
    return [Sums.from_list(row) for row in sums.tolist()]


def _guarded(mine: Contribution, action: Callable[[], T]) -> T:
    """What `action` gives; a rank that fails now makes all ranks raise."""
    way = mine.plan.transport
    cause, result = None, []
    try:
        result.append(action())
    except Exception as error:
        cause = error
    if int(way.max_(_tensor([[int(cause is not None)]])[0]).item()):
        raising.raise_failure(way, cause)
    return result[0]


def _tensor(rows: Rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64, device="cpu")
