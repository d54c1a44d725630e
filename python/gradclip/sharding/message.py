"""The vector that one all-reduce carries: sums, counts, the error count and the agreement tags.

Its length never depends on what a rank owns, nor on p, so that ranks which disagree about p still
finish the same collective and then see the disagreement. Two forms share the layout:

- SUM (finite p): limbs and counts add; a tag t travels as t and t² and all ranks agree iff
  n * sum(t²) == sum(t)² (Cauchy and Schwarz), in exact integers.
- MAX (p = ±inf): keys and flags take the maximum; a tag travels as t and -t.

The two form words are 1, 1 in SUM and 2^40, -2^40 in MAX. A reduction in which some ranks add and
others take maxima cannot give n, n (the first is at least 2^40) nor 2^40, -2^40 (a sum moves the
first off 2^40 unless all SUM ranks were dropped by maxima, which leave the second positive).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: Length of a `Sums` vector, and its fields (the numeric contract of gradclip-core).
SUMS = 144
LIMBS = 136
EXTREME = 141
NO_ELEMENT = -(2**63)

#: What ranks must agree on, in the order of their tags.
SUBJECTS = (
    "norm_type",
    "max_norm, eps, scale or error_if_nonfinite",
    "the group, plain=, distinct_dims=, check_replicas= or the number of parameters",
)

FORM, ERRORS, FAILED_RANK, DEFERRED, UNVERIFIED, PLAIN_COPIES, PLAIN_SHARDS, DOUBLE = (
    0,
    *range(2, 9),
)
TAGS = 9
BALANCES = TAGS + 2 * len(SUBJECTS)
TAIL = BALANCES + 4

TAG_BITS = 24
BALANCE = 2**40
_FORM_OF_MAX = 2**40


def nothing() -> list[int]:
    """The sums of no elements."""
    return [0] * EXTREME + [NO_ELEMENT] + [0] * (SUMS - EXTREME - 1)


def tag(*parts: object) -> int:
    """A small stable hash of what ranks must agree on; sums of its square stay far below 2^63."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - TAG_BITS)


def takes_max(norm_type: float) -> bool:
    """Whether the norm is reduced by maxima (p = ±inf) rather than by sums."""
    return math.isinf(norm_type)


@dataclass
class Tail:
    """What travels beside the sums.

    `failed` is this rank plus 1 when it failed. `deferred` says that its host reads the verdict
    later, so that no further round may follow now. `plain_copies` and `plain_shards` say that it
    took plain tensors so without being told; ranks must not differ in that. `double` says that it
    has float64 gradients. `balances` are words whose sum must vanish modulo 2^40.
    """

    failed: int
    unverified: bool
    plain_copies: bool
    plain_shards: bool
    double: bool
    tags: Sequence[int]
    balances: Sequence[int] = (0, 0, 0, 0)
    deferred: bool = False

    def words(self, maximum: bool) -> list[int]:
        """The tail in SUM or in MAX form."""
        form = [_FORM_OF_MAX, -_FORM_OF_MAX] if maximum else [1, 1]
        flags = (self.deferred, self.unverified, self.plain_copies, self.plain_shards, self.double)
        words = [*form, int(self.failed > 0), self.failed, *map(int, flags)]
        for value in self.tags:
            words += [value, -value] if maximum else [value, value * value]
        return words + ([0] * 4 if maximum else list(self.balances))


def compose(sums: torch.Tensor, tail: Tail, maximum: bool) -> torch.Tensor:
    """One int64 vector to reduce: the carried sums (n rows of SUMS words) and the tail.

    In SUM form the extreme key cannot travel, and its "no element" value would overflow.
    """
    words = torch.tensor(tail.words(maximum), dtype=torch.int64).to(sums.device, non_blocking=True)
    vector = torch.cat([sums.reshape(-1), words])
    if not maximum:
        vector[EXTREME:-TAIL:SUMS] = 0
    return vector


def split(vector: torch.Tensor, maximum: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of sums, shape (n, SUMS), and the tail of a reduced vector."""
    sums = vector[:-TAIL].view(-1, SUMS)
    if not maximum:
        sums[:, EXTREME].fill_(NO_ELEMENT)  # `=` would copy from the host
    return sums, vector[-TAIL:]


@dataclass(frozen=True)
class Verdict:
    """What the reduced tail says, read on the host."""

    failures: int
    unverified: int
    disagreements: tuple[str, ...]
    balanced: bool
    double: bool = False
    deferred: bool = False
    failed_rank: int | None = None

    @property
    def bad(self) -> bool:
        """Whether no rank may scale."""
        return bool(self.failures or self.disagreements or not self.balanced)


def read(tail: Sequence[int], maximum: bool) -> Verdict:
    """The verdict of a reduced tail; every rank reads the same."""
    mixed, ranks = _form(tail, maximum)
    if mixed:
        return Verdict(0, 0, SUBJECTS[:1], True)
    disagreements = tuple(
        subject
        for place, subject in enumerate(SUBJECTS)
        if not _agrees(tail[TAGS + 2 * place : TAGS + 2 * place + 2], ranks, maximum)
    )
    if tail[PLAIN_COPIES] and tail[PLAIN_SHARDS]:
        disagreements += ("plain tensors (pass plain=)",)
    balanced = all(word % BALANCE == 0 for word in tail[BALANCES:TAIL])
    alone = tail[ERRORS] == 1 or (maximum and tail[ERRORS] > 0)
    return Verdict(
        failures=tail[ERRORS],
        unverified=tail[UNVERIFIED],
        disagreements=disagreements,
        balanced=balanced,
        double=tail[DOUBLE] > 0,
        deferred=tail[DEFERRED] > 0,
        failed_rank=tail[FAILED_RANK] - 1 if alone else None,
    )


def expected(tail: Tail, ranks: int, maximum: bool) -> tuple[list[int], list[int]]:
    """What a good reduced tail holds, and 1 for each word that must hold just that.

    When all of n ranks have this rank's tags, sum(t) is n * t and sum(t²) is n * t²; and only
    then, as sum((t - mine)²) is what is left over.
    """
    fixed = [*range(FORM, FAILED_RANK + 1), *range(TAGS, BALANCES)]
    times = 1 if maximum else ranks
    words = tail.words(maximum)
    good = [0 if k in (ERRORS, FAILED_RANK) else times * word for k, word in enumerate(words)]
    return good, [int(k in fixed) for k in range(TAIL)]


def _form(tail: Sequence[int], maximum: bool) -> tuple[bool, int]:
    first, second = tail[FORM], tail[FORM + 1]
    if maximum:
        return (first, second) != (_FORM_OF_MAX, -_FORM_OF_MAX), 0
    return first != second or first >= _FORM_OF_MAX, first


def _agrees(words: Sequence[int], ranks: int, maximum: bool) -> bool:
    first, second = words
    return first == -second if maximum else ranks * second == first * first
