"""Comparing the replicas of a gradient without gathering them.

Replica 0 of r adds (r - 1) * h to a word of the vector and each other replica subtracts h, where h
is a hash of what must be equal (`agreement.balanced_share`). h covers either the outline (the
parameter, dtype, shape and number of replicas), at every call, or the content, by the digest of all
bits at their positions (`gradclip.reference.digest`), at some calls: see `Schedule`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from gradclip.sharding.agreement import BALANCE, Balance, balanced_share

_BUCKETS = 2048
_REGULAR = 1024


@dataclass(frozen=True)
class Replica:
    """One local tensor that is replica `index` of `count`.

    `identity` is the parameter's name or index; None where the caller named the ranks that hold
    replicas, which may call the parameter differently.
    """

    label: str
    identity: str | None
    index: int
    count: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def share(self, *content: object) -> Balance:
        """This replica's share of two balance words, for its outline or with its content."""
        outline = self.identity, str(self.dtype), self.shape
        return balanced_share(self.index, self.count, *outline, *content)


class Schedule:
    """When the contents of replicas are compared.

    `fresh` are replicas that were not compared yet, or were all zero when they were: zeros verify
    nothing. They are compared at each use. All replicas together are compared at the 2nd, 4th, 8th,
    ... use since the last fresh one, and then at every 1,024th; or at every n-th use, if the caller
    says so.

    Args:
        every: None for the rule above, False for never, True for each use, n for every n-th.
    """

    def __init__(self, every: bool | int | None) -> None:
        self.every = every
        self.uses = 0

    def compares_all(self) -> bool:
        """Whether the next use compares all replicas."""
        if self.every is False:
            return False
        if self.every is not None:
            return self.uses % int(self.every) == 0
        use = self.uses + 1
        return use % _REGULAR == 0 or (use < _REGULAR and use & (use - 1) == 0)

    def advance(self, verified_fresh: bool) -> None:
        """Count a use; one that compared fresh replicas for the first time begins anew."""
        begins = verified_fresh and self.every is None
        self.uses = 1 if begins else self.uses + 1

    def restart(self) -> None:
        """Compare at the next use: ranks no longer compare at the same uses."""
        self.uses = 0


def buckets(shares: Iterable[tuple[str, Balance]]) -> torch.Tensor:
    """Shares of labelled tensors, sorted into buckets by label, to find out which do not agree."""
    words = [0] * _BUCKETS
    for label, (share, _) in shares:
        bucket = _bucket(label)
        words[bucket] = (words[bucket] + share) % BALANCE
    return torch.tensor(words, dtype=torch.int64, device="cpu")


def suspects(labels: Iterable[str], reduced: torch.Tensor) -> list[str]:
    """The labels whose bucket does not balance over all ranks."""
    words = reduced.tolist()
    return [label for label in labels if words[_bucket(label)] % BALANCE]


def agree(reduced: torch.Tensor) -> bool:
    """Whether every bucket balances over all ranks; every rank sees the same."""
    return not bool((reduced % BALANCE).any())


def _bucket(label: str) -> int:
    spelled = label.encode(errors="backslashreplace")
    digest = hashlib.blake2b(spelled, digest_size=4).digest()
    return int.from_bytes(digest, "little") % _BUCKETS


def names(labels: Sequence[str]) -> str:
    """A few labels, and how many more."""
    return ", ".join(labels[:4]) + (f" and {len(labels) - 4} more" if len(labels) > 4 else "")
