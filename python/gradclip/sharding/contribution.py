"""What this rank brings to one clip: its sums, and the words that travel beside them.

Whatever fails here is kept as `cause`: this rank still takes part, and every rank hears of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from gradclip import engine
from gradclip._core import PowerScale
from gradclip.settings import Settings
from gradclip.sharding import message, verification
from gradclip.sharding.local import Local, read
from gradclip.sharding.partial import reduced_pieces
from gradclip.sharding.plan import Plan

T = TypeVar("T")
Rows = list[list[int]]

#: Norm types whose first pass is final: no term leaves float64's range.
_SINGLE_PASS = (0.0, 1.0, 2.0, math.inf, -math.inf)


class Contribution:
    """One rank's part in one call.

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
        self.settings = settings
        self.slots = slots
        self.maximum = message.takes_max(settings.norm_type)
        self.gathered = plan.gather(parameters)
        self.cause: Exception | None = self.gathered.cause
        pieces = reduced_pieces(plan.pending(self.gathered))
        self.local = self._attempt(lambda: Local(self.gathered, pieces))

    def deferrable(self) -> bool:
        """Whether the host has nothing to find out in this call: see `deferred`."""
        return (
            self.local is not None
            and self.cause is None
            and self.slots is None
            and not self.gathered.partial
            and not self.copies_to_compare()
            and not self.settings.error_if_nonfinite
            and self._takes_one_pass(self.local)
            and bool(self.plan.transport.ranks)
        )

    def _takes_one_pass(self, local: Local) -> bool:
        """Whether the first sums are final: of powers and of moduli they may not be."""
        norm_type = self.settings.norm_type
        is_real = local.gradients.core.first_complex is None
        return norm_type == 2.0 or (is_real and norm_type in _SINGLE_PASS)

    @property
    def width(self) -> int:
        """How many sums travel."""
        return 1 if self.slots is None else self.slots[0]

    def rows(self) -> Rows:
        """The sums of the first round; of no elements when this rank failed."""
        found = self._attempt(lambda: self.rows_of(self.settings.norm_type))
        return self._nothing() if found is None else found

    def _nothing(self) -> Rows:
        return [message.nothing()] * self.width

    def rows_of(self, norm_type: float) -> Rows:
        """The sums for a norm type: one row, or one for each slot."""
        assert self.local is not None
        if self.slots is None:
            return [self.local.sums(norm_type).to_list()]
        rows = self._nothing()
        for entry, sums in self.local.each(norm_type).items():
            rows[self.slots[1][entry]] = sums.to_list()
        return rows

    def scaled_rows(self, norm_type: float, scales: Sequence[PowerScale | None]) -> Rows:
        """Each slot with its own scale, since one for all would drown small gradients."""
        assert self.local is not None
        if self.slots is None:
            return [self.local.sums(norm_type, scales[0]).to_list()]
        rows = self._nothing()
        for entry, slot in self.slots[1].items():
            scale = scales[slot]
            if scale is not None and (sums := self.local.only(entry, norm_type, scale)):
                rows[slot] = sums.to_list()
        return rows

    def tail(self) -> message.Tail:
        """The words beside the sums."""
        copies, shards = self.plan.takes_plain_as(self.gathered)
        checking = self.copies_to_compare()
        contents = None if self.maximum else self._attempt(lambda: self.content_shares(checking))
        outlines = (0, 0) if self.maximum else self.gathered.outlines()
        return message.Tail(
            failed=0 if self.cause is None else self.plan.transport.rank + 1,
            unverified=bool(checking),
            plain_copies=copies,
            plain_shards=shards,
            double=self.local is not None and self.local.double,
            tags=self.tags(),
            balances=(*outlines, *verification.balance(contents or [])),
        )

    def tags(self) -> tuple[int, ...]:
        """The tags of `message.SUBJECTS`."""
        asked, rules, ranks = self.settings, self.plan.rules, self.plan.transport.ranks
        plain = rules.plain if isinstance(rules.plain, (str, int, type(None))) else "ranks"
        distinct = [dim if isinstance(dim, str) else "mesh" for dim in rules.distinct_dims]
        return (
            message.tag(asked.norm_type),
            message.tag(asked.max_norm, asked.eps, asked.scale, asked.error_if_nonfinite),
            message.tag(ranks, rules.check_replicas, plain, distinct, self.width),
        )

    def copies_to_compare(self) -> list[int]:
        """The places of the copies whose content is compared in this call."""
        check = self.plan.rules.check_replicas
        if check is False:
            return []
        return self.gathered.copies if check else self.gathered.unverified()

    def content_shares(self, places: Sequence[int]) -> list[verification.Balance]:
        """What this rank adds to the balance of contents; reads the whole local tensors."""
        entries = [self.gathered.entries[k] for k in places]
        whole = read(entries, [self.gathered.tensors[k] for k in places], [None] * len(places))
        contents = engine.sums_each(whole, 2.0)
        return [
            copy.weighed(verification.content_of(sums.to_list()))
            for position, sums in zip(whole.core.positions, contents, strict=True)
            if (copy := entries[position].copy) is not None
        ]

    def _attempt(self, action: Callable[[], T]) -> T | None:
        """What `action` gives, unless something failed on this rank before or does now."""
        if self.cause is not None:
            return None
        try:
            return action()
        except Exception as cause:
            self.cause = cause
            return None
