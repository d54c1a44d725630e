"""One clip over ranks: the rounds that every rank takes part in, and what each may raise.

The first round is the only one of a good clip. Further rounds follow only from what the reduced
vector says, which is the same on every rank: nobody waits for a round that others do not enter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import torch

from gradclip import engine
from gradclip._core import PowerScale, Sums, leading_norm_type
from gradclip.sharding import failure, message, verification
from gradclip.sharding.local import Local, read
from gradclip.sharding.partial import reduced_pieces
from gradclip.sharding.plan import Plan

T = TypeVar("T")

#: Norm types whose first pass is final: no term leaves float64's range.
_SINGLE_PASS = (0.0, 1.0, 2.0, math.inf, -math.inf)


@dataclass(frozen=True)
class Settings:
    """What every rank must have asked for alike."""

    norm_type: float
    max_norm: float = math.inf
    eps: float = 1e-6
    scale: float = 1.0
    error_if_nonfinite: bool = False

    def words(self) -> str:
        """How an error tells a rank's settings."""
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


class Exchange:
    """The rounds of one call.

    Args:
        plan: the parameters and the way to the other ranks.
        settings: what ranks must agree on.
        parameters: those of the plan, in its order.
        slots: None for one total; else how many parameters have sums of their own, and the slot
            of each entry of the plan by its id.
    """

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        parameters: Sequence[torch.Tensor],
        slots: tuple[int, dict[int, int]] | None = None,
    ) -> None:
        self.plan = plan
        self.transport = plan.transport
        self.settings = settings
        self.slots = slots
        self.maximum = message.takes_max(settings.norm_type)
        self.gathered = plan.gather(parameters)
        self.cause: Exception | None = self.gathered.cause
        pieces = reduced_pieces(plan.pending(self.gathered))
        self.double = False
        self.local: Local | None = None
        if self.cause is None:
            self.local = self._attempt(lambda: Local(self.gathered, pieces))

    def totals(self) -> list[float]:
        """The total norm over all ranks in float64; with slots, one for each."""
        norm_type = self.settings.norm_type
        found = [(sums, sums.total(norm_type)) for sums in self._first_round()]
        if all(total is not None for _, total in found):
            return [total for _, total in found if total is not None]
        return self._scaled_totals([total for _, total in found])

    def _scaled_totals(self, totals: list[float | None]) -> list[float]:
        """Two more rounds for terms that left float64's range: the extremes, then scaled sums."""
        norm_type = self.settings.norm_type
        extremes = self._round(self._rows(leading_norm_type(norm_type)), maximum=True)
        scales = [
            extreme.scale(norm_type) if total is None else None
            for extreme, total in zip(extremes, totals, strict=True)
        ]
        rows = self._round(self._scaled_rows(norm_type, scales), maximum=False)
        again = [sums.total(norm_type, scale) for sums, scale in zip(rows, scales, strict=True)]
        return [
            total if total is not None else scaled or 0.0
            for total, scaled in zip(totals, again, strict=True)
        ]

    def deferrable(self) -> bool:
        """Whether the host has nothing to find out in this call: see `deferred`."""
        return (
            self.local is not None
            and self.cause is None
            and self.slots is None
            and not self.gathered.partial
            and not self._copies_to_compare()
            and not self.settings.error_if_nonfinite
            and self.settings.norm_type in _SINGLE_PASS
            and bool(self.transport.ranks)
        )

    def deferred_tail(self) -> message.Tail:
        """The tail of a call whose verdict the host reads later."""
        tail = self._tail()
        tail.deferred = True
        return tail

    def give_up(self, cause: Exception) -> None:
        """Send a vector that says that this rank failed, so that no other rank waits for it."""
        self.cause = cause
        tail = self.deferred_tail()
        rows = torch.tensor([message.nothing()] * self.width, dtype=torch.int64)
        self._reduce(message.compose(rows, tail, self.maximum), self.maximum)

    def _first_round(self) -> list[Sums]:
        rows = self._attempt(lambda: self._rows(self.settings.norm_type))
        tail = self._tail()
        if rows is None or tail.failed:
            rows = [message.nothing()] * self.width
        vector = message.compose(torch.tensor(rows, dtype=torch.int64), tail, self.maximum)
        sums, words = message.split(self._reduce(vector, self.maximum), self.maximum)
        self._judge(message.read(words.tolist(), self.maximum))
        return [Sums.from_list(row) for row in sums.tolist()]

    def _round(self, rows: list[list[int]], maximum: bool) -> list[Sums]:
        """A further round of sums alone: what could go wrong on one rank was found before."""
        tail = message.Tail(0, False, False, False, False, self._tags())
        vector = message.compose(torch.tensor(rows, dtype=torch.int64), tail, maximum)
        sums, _ = message.split(self._reduce(vector, maximum), maximum)
        return [Sums.from_list(row) for row in sums.tolist()]

    def _reduce(self, vector: torch.Tensor, maximum: bool) -> torch.Tensor:
        reduced = self.transport.max_(vector) if maximum else self.transport.sum_(vector)
        return reduced.cpu()

    def _attempt(self, action: Callable[[], T]) -> T | None:
        """What `action` gives, unless something failed on this rank before or does now."""
        if self.cause is not None:
            return None
        try:
            return action()
        except (ValueError, TypeError, RuntimeError) as cause:
            self.cause = cause
            return None

    @property
    def width(self) -> int:
        """How many sums travel."""
        return 1 if self.slots is None else self.slots[0]

    def _rows(self, norm_type: float) -> list[list[int]]:
        assert self.local is not None
        if self.slots is None:
            return [self.local.sums(norm_type).to_list()]
        rows = [message.nothing()] * self.width
        for entry, sums in self.local.each(norm_type).items():
            rows[self.slots[1][entry]] = sums.to_list()
        return rows

    def _scaled_rows(
        self, norm_type: float, scales: Sequence[PowerScale | None]
    ) -> list[list[int]]:
        """Each slot with its own scale, since one for all would drown small gradients."""
        assert self.local is not None
        if self.slots is None:
            return [self.local.sums(norm_type, scales[0]).to_list()]
        rows = [message.nothing()] * self.width
        for entry, slot in self.slots[1].items():
            scale = scales[slot]
            if scale is not None and (sums := self.local.only(entry, norm_type, scale)):
                rows[slot] = sums.to_list()
        return rows

    def _tags(self) -> tuple[int, ...]:
        asked, rules = self.settings, self.plan.rules
        plain = rules.plain if isinstance(rules.plain, (str, int, type(None))) else "ranks"
        distinct = [dim if isinstance(dim, str) else "mesh" for dim in rules.distinct_dims]
        return (
            message.tag(asked.norm_type),
            message.tag(asked.max_norm, asked.eps, asked.scale, asked.error_if_nonfinite),
            message.tag(self.transport.ranks, rules.check_replicas, plain, distinct, self.width),
        )

    def _tail(self) -> message.Tail:
        copies, shards = self.plan.takes_plain_as(self.gathered)
        checking = self._copies_to_compare()
        contents = None if self.maximum else self._attempt(lambda: self._content_shares(checking))
        outlines = (0, 0) if self.maximum else self.gathered.outlines()
        return message.Tail(
            failed=0 if self.cause is None else self.transport.rank + 1,
            unverified=bool(checking),
            plain_copies=copies,
            plain_shards=shards,
            double=self.local is not None and self.local.double,
            tags=self._tags(),
            balances=(*outlines, *verification.balance(contents or [])),
        )

    def _copies_to_compare(self) -> list[int]:
        check = self.plan.rules.check_replicas
        if check is False:
            return []
        return self.gathered.copies if check else self.gathered.unverified()

    def _content_shares(self, places: Sequence[int]) -> list[verification.Balance]:
        """What this rank adds to the balance of contents; reads the whole local tensors."""
        entries = [self.gathered.entries[k] for k in places]
        whole = read(entries, [self.gathered.tensors[k] for k in places], [None] * len(places))
        contents = engine.sums_each(whole, 2.0)
        return [
            copy.weighed(verification.content_of(sums.to_list()))
            for position, sums in zip(whole.core.positions, contents, strict=True)
            if (copy := entries[position].copy) is not None
        ]

    def _judge(self, verdict: message.Verdict) -> None:
        """Raise on every rank, or on none."""
        self.double = verdict.double
        if verdict.bad and verdict.deferred:
            failure.raise_unheard(verdict, self.cause, self.transport.label)
        if verdict.disagreements:
            failure.raise_disagreement(self.transport, verdict.disagreements, self.settings.words())
        if verdict.failures:
            failure.raise_failure(self.transport, self.cause)
        if not verdict.balanced or (self.maximum and verdict.unverified and not verdict.deferred):
            self._compare_by_name()
        for k in self.gathered.copies if verdict.unverified else ():
            self.gathered.entries[k].verified = True

    def _compare_by_name(self) -> None:
        """Compare all copies once more, sorted by name, and raise which ones differ."""
        places = self.gathered.copies
        shares = self._content_shares(places)
        copies = [copy for k in places if (copy := self.gathered.entries[k].copy) is not None]
        reduced = self.transport.sum_(verification.buckets(copies, shares)).cpu()
        if verification.balances(reduced):
            return
        suspects = verification.suspects(copies, reduced)
        words = verification.words_for(suspects) if suspects else None
        agreed = failure.elected_words(self.transport, words)
        if agreed is not None:
            raise failure.ShardedClipError(agreed)
