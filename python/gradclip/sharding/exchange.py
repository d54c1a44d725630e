"""One clip over ranks: the rounds that every rank takes part in, and what each may raise.

The first round is the only one of a good clip. Further rounds follow only from what the reduced
vector says, which is the same on every rank: nobody waits for a round that others do not enter.
"""

from __future__ import annotations

import torch

from gradclip._core import Sums, leading_norm_type
from gradclip.sharding import failure, message, verification
from gradclip.sharding.contribution import Contribution, Rows


class Exchange:
    """The rounds of one call with this rank's contribution."""

    def __init__(self, mine: Contribution) -> None:
        self.mine = mine
        self.transport = mine.plan.transport
        self.double = False

    def totals(self) -> list[float]:
        """The total norm over all ranks in float64; with slots, one for each."""
        norm_type = self.mine.settings.norm_type
        found = [(sums, sums.total(norm_type)) for sums in self._first_round()]
        if all(total is not None for _, total in found):
            return [total for _, total in found if total is not None]
        return self._scaled_totals([total for _, total in found])

    def _scaled_totals(self, totals: list[float | None]) -> list[float]:
        """Two more rounds for terms that left float64's range: the extremes, then scaled sums."""
        norm_type = self.mine.settings.norm_type
        extremes = self._round(self.mine.rows_of(leading_norm_type(norm_type)), maximum=True)
        scales = [
            extreme.scale(norm_type) if total is None else None
            for extreme, total in zip(extremes, totals, strict=True)
        ]
        rows = self._round(self.mine.scaled_rows(norm_type, scales), maximum=False)
        again = [sums.total(norm_type, scale) for sums, scale in zip(rows, scales, strict=True)]
        return [
            total if total is not None else scaled or 0.0
            for total, scaled in zip(totals, again, strict=True)
        ]

    def give_up(self, cause: Exception) -> None:
        """Send a vector that says that this rank failed, so that no other rank waits for it."""
        self.mine.cause = cause
        tail = self.mine.tail()
        tail.deferred = True
        self._reduced(self.mine.rows(), tail, self.mine.maximum)

    def _first_round(self) -> list[Sums]:
        rows = self.mine.rows()
        sums, tail = self._reduced(rows, self.mine.tail(), self.mine.maximum)
        self._judge(message.read(tail.tolist(), self.mine.maximum))
        return [Sums.from_list(row) for row in sums.tolist()]

    def _round(self, rows: Rows, maximum: bool) -> list[Sums]:
        """A further round of sums alone: what could go wrong on one rank was found before."""
        tail = message.Tail(0, False, False, False, False, self.mine.tags())
        sums, _ = self._reduced(rows, tail, maximum)
        return [Sums.from_list(row) for row in sums.tolist()]

    def _reduced(
        self, rows: Rows, tail: message.Tail, maximum: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums and tail over all ranks, on the host."""
        vector = message.compose(torch.tensor(rows, dtype=torch.int64), tail, maximum)
        reduced = self.transport.max_(vector) if maximum else self.transport.sum_(vector)
        return message.split(reduced.cpu(), maximum)

    def _judge(self, verdict: message.Verdict) -> None:
        """Raise on every rank, or on none."""
        self.double = verdict.double
        if verdict.bad and verdict.deferred:
            failure.raise_unheard(verdict, self.mine.cause, self.transport.label)
        if verdict.failures:
            failure.raise_failure(self.transport, self.mine.cause)
        if verdict.disagreements:
            told = self.mine.cause or self.mine.settings.words()
            failure.raise_disagreement(self.transport, verdict.disagreements, f"{told}")
        unseen = self.mine.maximum and verdict.unverified and not verdict.deferred
        if not verdict.balanced or unseen:
            self._compare_by_name()
        if verdict.unverified:
            self.mine.gathered.mark_verified()

    def _compare_by_name(self) -> None:
        """Compare all copies once more, sorted by name, and raise which ones differ."""
        gathered = self.mine.gathered
        shares = self.mine.content_shares(gathered.copies)
        copies = [copy for k in gathered.copies if (copy := gathered.entries[k].copy)]
        reduced = self.transport.sum_(verification.buckets(copies, shares)).cpu()
        if verification.balances(reduced):
            return
        suspects = verification.suspects(copies, reduced)
        words = verification.words_for(suspects) if suspects else None
        agreed = failure.elected_words(self.transport, words)
        if agreed is not None:
            raise failure.ShardedClipError(agreed)
