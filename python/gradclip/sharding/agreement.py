"""What ranks agree on: the words that travel beside the sums in the first all-reduce of a call.

The vector has one length for every function, norm type and list, so ranks that differ in any of
these still finish the same collective and then see that they differ. Two forms share the layout:

- SUM (finite p): limbs and counts add. A tag t travels as t and t², and all ranks agree iff
  n * sum(t²) == sum(t)² (Cauchy and Schwarz), in exact integers. Balances are words whose sum over
  ranks vanishes modulo 2^40 iff the ranks that share something hold the same.
- MAX (p = ±inf): keys and flags take the maximum; a tag travels as t and -t. Balances need a sum
  and do not travel: a call whose balances are those of an earlier SUM exchange sends the token of
  that exchange instead, and any other call has a SUM exchange follow.

The two words of the form are 1, 1 in SUM and 2^40, -2^40 in MAX. A reduction in which some ranks
add and others take maxima cannot give n, n (the first is at least 2^40) nor 2^40, -2^40 (a sum
moves the first off 2^40 unless all SUM ranks were dropped by maxima, which leave the second
positive).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

#: Length of a `Sums` vector, and its fields (the numeric contract of gradclip-core).
SUMS = 144
LIMBS = 136
OUT_OF_RANGE = 140
EXTREME = 141
NO_ELEMENT = -(2**63)

#: What ranks must agree on, in the order of their tags.
SUBJECTS = (
    "the function",
    "norm_type",
    "max_norm, eps, scale or error_if_nonfinite",
    "the group, plain=, distinct_dims= or check_replicas=",
)

FORM, ERRORS, FAILED_RANK, DEFERRED, COMPARING, PLAIN_REPLICAS, PLAIN_SHARDS = 0, *range(2, 8)
SHARDS_UNCHECKED, DOUBLE, PENDING, CHANGED, NONCE = range(8, 13)
TAGS = 14
TOKEN = TAGS + 2 * len(SUBJECTS)
LISTS = TOKEN + 2
SHARDS = LISTS + 4
BALANCES = SHARDS + 4
#: Where each pair of balance words lies: parameters and replicas listed, sums pending, contents of
#: replicas, and which contents are compared at all.
OUTLINE, PENDING_SUMS, CONTENT, COMPARED = range(BALANCES, BALANCES + 8, 2)
TAIL = BALANCES + 8

TAG_BITS = 24
BALANCE = 2**40
NONCE_BITS = 40
_FORM_OF_MAX = 2**40

Balance = tuple[int, int]


def nothing() -> list[int]:
    """The sums of no elements."""
    return [0] * EXTREME + [NO_ELEMENT] + [0] * (SUMS - EXTREME - 1)


def digest(*parts: object) -> int:
    """80 bits that stand for values with a stable `repr`."""
    spelled = repr(parts).encode(errors="backslashreplace")
    return int.from_bytes(hashlib.blake2b(spelled, digest_size=10).digest(), "little")


def tag(*parts: object) -> int:
    """A hash so small that sums of its square stay far below 2^63."""
    return digest(*parts) >> (80 - TAG_BITS)


def wide_tag(*parts: object) -> tuple[int, int]:
    """Two independent tags."""
    spelled = digest(*parts)
    return spelled % 2**TAG_BITS, (spelled >> 40) % 2**TAG_BITS


def balanced_share(index: int, count: int, *parts: object) -> Balance:
    """What member `index` of `count` adds to two balance words for something that all must share.

    Member 0 adds (count - 1) times a hash and each other member subtracts it, so the sum vanishes
    modulo 2^40 if all hold the same; if they do not, by chance 2^-80.
    """
    spelled = digest(count, *parts)
    weight = count - 1 if index == 0 else -1
    return weight * (spelled % BALANCE) % BALANCE, weight * (spelled >> 40) % BALANCE


def added(shares: Iterable[Balance]) -> Balance:
    """The two words that several shares come to."""
    first = second = 0
    for one, two in shares:
        first, second = first + one, second + two
    return first % BALANCE, second % BALANCE


def takes_max(norm_type: float) -> bool:
    """Whether the norm is reduced by maxima (p = ±inf) rather than by sums."""
    return math.isinf(norm_type)


class Balances(NamedTuple):
    """One rank's balance words."""

    outline: Balance = (0, 0)
    pending: Balance = (0, 0)
    content: Balance = (0, 0)
    compared: Balance = (0, 0)


@dataclass(frozen=True)
class Tail:
    """One rank's words beside the sums.

    Attributes:
        nonce: a random number of this rank's session.
        tags: a tag for each of `SUBJECTS`.
        token: the sum of all ranks' nonces at the last SUM exchange that agreed; 0 without one.
        listed: tags of the list of parameters, where norms of each are wanted.
        shards: tags of the contents of plain shards, where these are compared.
        failed: this rank plus 1 when it failed, else 0.
        deferred: its host reads the verdict later, so no further exchange may follow now.
        comparing: it compares contents of replicas.
        plain_replicas: it took plain tensors as replicas by default.
        plain_shards: it took plain tensors as shards by default.
        shards_unchecked: it did not compare the contents of plain shards.
        double: it has float64 gradients.
        pending: it has gradients whose sum is pending.
        changed: its balances are not those of the exchange that `token` names.
        balances: words whose sum over all ranks must vanish modulo 2^40.
    """

    nonce: int
    tags: tuple[int, ...]
    token: int = 0
    listed: tuple[int, int] = (0, 0)
    shards: tuple[int, int] = (0, 0)
    failed: int = 0
    deferred: bool = False
    comparing: bool = False
    plain_replicas: bool = False
    plain_shards: bool = False
    shards_unchecked: bool = True
    double: bool = False
    pending: bool = False
    changed: bool = False
    balances: Balances = field(default_factory=Balances)

    def words(self, maximum: bool) -> list[int]:
        """The tail in MAX or in SUM form."""
        flags = (
            self.failed > 0,
            self.failed,
            self.deferred,
            self.comparing,
            self.plain_replicas,
            self.plain_shards,
            self.shards_unchecked,
            self.double,
            self.pending,
            self.changed,
        )
        if maximum:
            words = [_FORM_OF_MAX, -_FORM_OF_MAX, *map(int, flags), self.nonce, -self.nonce]
            for value in (*self.tags, self.token, *self.listed, *self.shards):
                words += value, -value
            return words + [0] * (TAIL - BALANCES)
        words = [1, 1, *map(int, flags), self.nonce, 0]
        for value in (*self.tags, 0, *self.listed, *self.shards):
            words += value, value * value
        return words + [word for pair in self.balances for word in pair]


def compose(sums: torch.Tensor, tail: Tail, maximum: bool) -> torch.Tensor:
    """One int64 vector to reduce: sums (n rows of SUMS words), then the tail.

    In SUM form the extreme key cannot travel, and its "no element" value would overflow.
    """
    words = torch.tensor(tail.words(maximum), dtype=torch.int64, device="cpu")
    vector = torch.cat([sums.reshape(-1), words.to(sums.device, non_blocking=True)])
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
    """What the reduced tail says; every rank reads the same."""

    ranks: int = 0
    """Ranks that took part; 0 in MAX form, which cannot count."""
    failures: int = 0
    failed_rank: int | None = None
    disagreements: tuple[str, ...] = ()
    is_mixed: bool = False
    """Some ranks added, others took maxima."""
    deferred: bool = False
    comparing: bool = False
    double: bool = False
    pending: bool = False
    changed: bool = False
    nonces: tuple[int, int] = (0, 0)
    same_list: bool = True
    all_shards_compared: bool = False
    same_shards: bool = False
    """Every rank compared its plain shards, and all hold the same."""
    outline_agrees: bool = True
    pending_agrees: bool = True
    content_agrees: bool = True
    compared_agrees: bool = True

    @property
    def bad(self) -> bool:
        """Whether no rank may scale, as far as one exchange can say."""
        return bool(
            self.failures
            or self.disagreements
            or self.same_shards
            or not self.outline_agrees
            or not self.pending_agrees
            or (self.compared_agrees and not self.content_agrees)
        )

    @property
    def needs_rounds(self) -> bool:
        """Whether further rounds would have to follow, to decide or to reduce pending sums."""
        return self.bad or self.pending or self.changed


def read(tail: Sequence[int], maximum: bool) -> Verdict:
    """The verdict of a reduced tail."""
    is_mixed, ranks = _form(tail, maximum)
    if is_mixed:
        return Verdict(is_mixed=True, disagreements=SUBJECTS[1:2])

    def agrees(position: int) -> bool:
        first, second = tail[position : position + 2]
        return first == -second if maximum else ranks * second == first * first

    def balances(position: int) -> bool:
        return all(word % BALANCE == 0 for word in tail[position : position + 2])

    disagreements = tuple(subject for k, subject in enumerate(SUBJECTS) if not agrees(TAGS + 2 * k))
    if tail[PLAIN_REPLICAS] and tail[PLAIN_SHARDS]:
        disagreements += ("plain tensors (pass plain=)",)
    several = ranks > 1 or (maximum and tail[NONCE] != -tail[NONCE + 1])
    compared = tail[SHARDS_UNCHECKED] == 0
    alone = tail[ERRORS] == 1 or (maximum and tail[ERRORS] > 0)
    return Verdict(
        ranks=ranks,
        failures=tail[ERRORS],
        failed_rank=tail[FAILED_RANK] - 1 if alone else None,
        disagreements=disagreements,
        deferred=tail[DEFERRED] > 0,
        comparing=tail[COMPARING] > 0,
        double=tail[DOUBLE] > 0,
        pending=tail[PENDING] > 0,
        changed=maximum and (tail[CHANGED] > 0 or not agrees(TOKEN)),
        nonces=(tail[NONCE], tail[NONCE + 1]),
        same_list=agrees(LISTS) and agrees(LISTS + 2),
        all_shards_compared=compared,
        same_shards=several and compared and agrees(SHARDS) and agrees(SHARDS + 2),
        outline_agrees=balances(OUTLINE),
        pending_agrees=balances(PENDING_SUMS),
        content_agrees=balances(CONTENT),
        compared_agrees=balances(COMPARED),
    )


def expected(tail: Tail, ranks: int, maximum: bool) -> tuple[list[int], list[int]]:
    """What a good reduced tail holds, and 1 for each word that must hold just that.

    When all of n ranks have this rank's tags, sum(t) is n * t and sum(t²) is n * t²; and only
    then, as sum((t - mine)²) is what is left over.
    """
    zero = {ERRORS, FAILED_RANK, PENDING, *((CHANGED,) if maximum else ())}
    fixed = {FORM, FORM + 1, *zero, *range(TAGS, LISTS)}
    times = 1 if maximum else ranks
    good = [0 if k in zero else times * word for k, word in enumerate(tail.words(maximum))]
    return good, [int(k in fixed) for k in range(TAIL)]


def _form(tail: Sequence[int], maximum: bool) -> tuple[bool, int]:
    first, second = tail[FORM], tail[FORM + 1]
    if maximum:
        return (first, second) != (_FORM_OF_MAX, -_FORM_OF_MAX), 0
    return first != second or not 0 < first < _FORM_OF_MAX, first
