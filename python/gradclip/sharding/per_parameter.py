"""The norm of each parameter over all ranks that hold parts of it.

After the first exchange all ranks know whether they list the same parameters. If they do, the sums
of all parameters travel in one more all-reduce, in the order of their keys. If they do not, as over
the stages of a pipeline, two small rounds tell which lists there are, and each list has rows of its
own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from gradclip._core import PowerScale, Sums
from gradclip.sharding import agreement, exchange, raising
from gradclip.sharding.contribution import Contribution
from gradclip.sharding.errors import UNCHANGED, ShardedClipError
from gradclip.sharding.exchange import Outcome, Rows
from gradclip.sharding.plan import Entry, Plan


class Layout(NamedTuple):
    """The rows of the sums that travel: how many over all lists, and the row of each parameter."""

    rows: int
    row_of: dict[Entry, int]


def norms(mine: Contribution) -> tuple[dict[Entry, float], Outcome]:
    """The norm of each parameter of this rank's list, in float64.

    Raises:
        ShardedClipError: on every rank alike.
    """
    outcome = exchange.agree(mine, lambda local: agreement.nothing())
    plan = mine.plan
    layout = _one_list(plan) if outcome.same_list else _several_lists(mine, outcome)

    def summed(norm_type: float, scales: Sequence[PowerScale | None]) -> Rows:
        rows = [agreement.nothing() for _ in range(layout.rows)]
        assert mine.local is not None, "a rank that failed has raised"
        parts = [mine.local] if outcome.pieces is None else [mine.local, outcome.pieces.read()]
        for part in parts:
            if not any(scales):
                for entry, sums in part.each(norm_type).items():
                    rows[layout.row_of[entry]] = _merged(rows[layout.row_of[entry]], sums)
                continue
            for entry, row in layout.row_of.items():  # a scale each: one would drown small ones
                scale = scales[row]
                if scale is not None and (only := part.only(entry, norm_type, scale)):
                    rows[row] = _merged(rows[row], only)
        return rows

    if not layout.rows:
        return {}, outcome
    norm_type = mine.request.settings.norm_type
    unscaled: list[PowerScale | None] = [None] * layout.rows
    sums = exchange.further_round(
        mine, layout.rows, lambda: summed(norm_type, unscaled), mine.request.maximum
    )
    found = exchange.finished(mine, sums, summed, outcome)
    return {entry: found[row] for entry, row in layout.row_of.items()}, outcome


def _merged(row: list[int], sums: Sums) -> list[int]:
    return Sums.from_list(row).merged(sums).to_list()


def _one_list(plan: Plan, first: int = 0) -> Layout:
    keys = plan.keys()
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return Layout(len(keys), {plan.entries[k]: first + row for row, k in enumerate(order)})


def _several_lists(mine: Contribution, outcome: Outcome) -> Layout:
    """Rows for each different list, in the order of their tags.

    Raises:
        ShardedClipError: on every rank, if lists that differ hold shards of one parameter.
    """
    way, plan = mine.plan.transport, mine.plan
    if not way.ranks:
        raise ShardedClipError(
            "ranks list different parameters for grad_norms, and `reduce` alone does not tell how"
            f" many ranks there are; pass group= too, or list the same ones; {UNCHANGED}"
        )
    table = torch.zeros(len(way.ranks), 2, dtype=torch.int64, device="cpu")
    high, low = plan.list_tags()
    own = (high << agreement.TAG_BITS) + low
    table[way.ranks.index(way.rank)] = torch.tensor([own, len(plan.entries)], device="cpu")
    lists = dict(way.sum_(table.flatten()).cpu().view(-1, 2).tolist())
    first, total = 0, sum(lists.values())
    for tag in sorted(lists):
        if tag == own:
            break
        first += lists[tag]
    layout = _one_list(plan, first)
    _refuse_shared_shards(mine, layout, total)
    return Layout(total, layout.row_of)


def _refuse_shared_shards(mine: Contribution, layout: Layout, total: int) -> None:
    """Refuse a parameter that several lists hold shards of: its norm would be of neither."""
    way = mine.plan.transport
    keys = dict(zip(mine.plan.entries, mine.plan.keys(), strict=True))
    identities = torch.zeros(max(total, 1), dtype=torch.int64, device="cpu")
    own = {}
    for entry, row in layout.row_of.items():
        identity, holders = keys[entry]
        if not holders:
            own[row] = entry.label
            identities[row] = 1 + agreement.digest(identity) % 2**60
    everyone = way.max_(identities).cpu().tolist()
    shared = {value for value in everyone if value and everyone.count(value) > 1}
    if shared:
        labels = [label for row, label in own.items() if everyone[row] in shared]
        message = None
        if labels:
            message = (
                f"ranks list different parameters for grad_norms, and {labels[0]} in more than one"
                " of the lists; list the same parameters on all ranks that hold shards of them, or"
                " pass (name, parameter) pairs whose names are unique to each stage"
            )
        raising.raise_agreed(way, message, "ranks list different parameters for grad_norms")
