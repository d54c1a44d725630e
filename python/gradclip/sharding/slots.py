"""Where each parameter's own sums travel when every parameter's norm is wanted.

Ranks of one stage hold pieces of the same parameters, in the same order, and share a slot for each;
the stages of a pipeline follow one another in the vector. How many parameters each stage has is
asked once for a list of parameters, in two small rounds of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradclip.sharding.copies import digit_values
from gradclip.sharding.failure import ShardedClipError, raise_failure
from gradclip.sharding.plan import Plan

_ABSTAIN = -(2**40)


@dataclass(frozen=True)
class Slots:
    """`total` slots over all stages; this rank's parameters take those from `first` on."""

    total: int
    first: int

    def of(self, plan: Plan) -> dict[int, int]:
        """The slot of each parameter, by the id of its entry."""
        return {id(entry): self.first + k for k, entry in enumerate(plan.entries)}


def agreed_slots(plan: Plan, cause: Exception | None = None) -> Slots:
    """The slots of this list of parameters; `cause` is why this rank refuses, if it does.

    Raises:
        ShardedClipError: on every rank, when one refuses, or when ranks of one stage list
            different numbers of parameters.
    """
    stage, stages = _stage(plan)
    asked = torch.tensor([stages, int(cause is not None)], dtype=torch.int64)
    known, refused = plan.transport.max_(asked).tolist()
    if refused:
        raise_failure(plan.transport, cause)
    counts = torch.full((2, known), _ABSTAIN, dtype=torch.int64)
    if plan.entries:
        counts[:, stage] = torch.tensor([len(plan.entries), -len(plan.entries)])
    most, least = plan.transport.max_(counts.flatten()).view(2, known).tolist()
    widths = [max(0, count) for count in most]
    if any(most[k] != -least[k] for k in range(known) if widths[k]):
        raise ShardedClipError(
            f"ranks list between {min(-c for c in least)} and {max(widths)} parameters for"
            " grad_norms; list the same ones, in the same order, on all ranks of a stage"
        )
    return Slots(sum(widths), sum(widths[:stage]))


def _stage(plan: Plan) -> tuple[int, int]:
    """This rank's stage and the number of stages, along the distinct dimensions."""
    number, stages = 0, 1
    for layout in plan.layouts[:1]:
        digits = plan.around.distinct_digits(layout)
        for value, (_, size) in zip(
            digit_values(layout.root.index(plan.around.rank), digits), digits, strict=True
        ):
            number, stages = number * size + value, stages * size
    return number, stages
