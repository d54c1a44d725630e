"""Comparing the copies of a gradient without gathering them, and without an agreed order.

Copy 0 of r adds (r - 1) * h to a word of the vector and each other copy subtracts h, where h is a
hash of what must be equal. The sum over ranks vanishes modulo 2^40 when all copies are equal, for
all tensors in one word, whatever their order on a rank; two words make a chance match (2^-80)
negligible. h covers either the outline (dtype, shape, how many copies), which is checked at every
call, or the exact limbs of the content, at the first call and when the plan changes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from gradclip.sharding.message import BALANCE, LIMBS
from gradclip.sharding.ownership import DISTINCT, remedy

Balance = tuple[int, int]
_BUCKETS = 2048


@dataclass(frozen=True)
class Copy:
    """One local tensor that is copy `index` of `count`."""

    label: str
    index: int
    count: int
    outline: tuple[object, ...]

    def weighed(self, content: bytes = b"") -> Balance:
        """This copy's share of the two balance words."""
        spelled = repr((self.count, self.outline)).encode() + content
        digest = hashlib.blake2b(spelled, digest_size=10).digest()
        weight = self.count - 1 if self.index == 0 else -1
        halves = int.from_bytes(digest[:5], "little"), int.from_bytes(digest[5:], "little")
        return weight * halves[0] % BALANCE, weight * halves[1] % BALANCE


def balance(shares: Iterable[Balance]) -> Balance:
    """The two words that one rank contributes."""
    first = second = 0
    for one, two in shares:
        first, second = (first + one) % BALANCE, (second + two) % BALANCE
    return first, second


def content_of(sums: Sequence[int]) -> bytes:
    """What is compared of a tensor's exact sum: its limbs, carried, and its non-finite counts."""
    return array("q", sums[: LIMBS + 3]).tobytes()


def buckets(copies: Sequence[Copy], shares: Sequence[Balance]) -> torch.Tensor:
    """The shares sorted into buckets by label, to find out whose copies differ."""
    words = [0] * _BUCKETS
    for copy, (share, _) in zip(copies, shares, strict=True):
        place = _bucket(copy)
        words[place] = (words[place] + share) % BALANCE
    return torch.tensor(words, dtype=torch.int64)


def balances(reduced: torch.Tensor) -> bool:
    """Whether every bucket balances over all ranks; every rank sees the same."""
    return not bool((reduced % BALANCE).any())


def suspects(copies: Sequence[Copy], reduced: torch.Tensor) -> list[str]:
    """The labels of the copies whose bucket does not balance over all ranks."""
    words = reduced.tolist()
    return [copy.label for copy in copies if words[_bucket(copy)] % BALANCE]


def _bucket(copy: Copy) -> int:
    digest = hashlib.blake2b(copy.label.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % _BUCKETS


def words_for(labels: Sequence[str]) -> str:
    """The error for gradients whose copies differ."""
    named = ", ".join(labels[:4]) + (f" and {len(labels) - 4} more" if len(labels) > 4 else "")
    return (
        f"copies of {named} differ between the ranks that should hold equal ones; if each rank has"
        ' its own tensor (hand-made expert parallelism), pass plain="distinct", or'
        f" {remedy(labels[0], DISTINCT)}; if its mesh lacks the dimension of pipeline stages, name"
        " that in distinct_dims= (a name or a mesh); else reduce the gradients before clipping"
    )
