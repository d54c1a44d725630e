"""The way of an error: found on some ranks, raised in the same words on all.

A good clip needs none of this: the vector says that nothing failed. When it says that something
did, every rank knows, so every rank may take part in the further rounds that carry the words.
"""

from __future__ import annotations

import torch

from gradclip.sharding.message import Verdict
from gradclip.sharding.transport import Transport

_TEXT_BYTES = 1024
_FIRST = 2**40


class ShardedClipError(RuntimeError):
    """A clip over ranks that no rank carried out; every rank raises the same words."""


def elected_words(transport: Transport, words: str | None) -> str | None:
    """The words of the lowest rank that has any, on every rank (two rounds)."""
    bid = _FIRST - transport.rank if words is not None else 0
    best = int(transport.max_(torch.tensor([bid], dtype=torch.int64)).item())
    if best == 0:
        return None
    text = torch.zeros(_TEXT_BYTES, dtype=torch.int64)
    if words is not None and bid == best:
        spelled = words.encode()[:_TEXT_BYTES]
        text[: len(spelled)] = torch.tensor(list(spelled), dtype=torch.int64)
    spelled = bytes(transport.sum_(text).tolist()).rstrip(b"\0")
    return spelled.decode(errors="ignore")


def raise_unheard(verdict: Verdict, cause: BaseException | None, label: str) -> None:
    """Raise what the vector alone tells, where some ranks take part in no further round now."""
    if cause is not None:
        words = f"{label}: {cause}"
    elif verdict.failures:
        who = "ranks" if verdict.failed_rank is None else f"rank {verdict.failed_rank}"
        words = f"{who} could not clip and raised the reason"
    elif verdict.disagreements:
        words = f"ranks disagree about {', '.join(verdict.disagreements)}"
    else:
        words = "copies of a gradient differ between ranks; check_replicas=True tells which"
    raise ShardedClipError(f"{words}; no gradient was changed on any rank") from cause


def raise_failure(transport: Transport, cause: BaseException | None) -> None:
    """Raise on every rank what the lowest failing rank found; `cause` is this rank's own."""
    words = None if cause is None else f"{transport.label}: {cause}"
    agreed = elected_words(transport, words)
    raise ShardedClipError(f"{agreed}; no gradient was changed on any rank") from cause


def raise_disagreement(transport: Transport, subjects: tuple[str, ...], settings: str) -> None:
    """Raise on every rank how the lowest rank's settings differ from the next that differs."""
    own = f"{transport.label} has {settings}"
    first = elected_words(transport, own) or own
    differs = first.partition(" has ")[2] != settings
    other = elected_words(transport, own if differs else None)
    raise ShardedClipError(
        f"ranks disagree about {', '.join(subjects)}: {first}"
        + (f", {other}" if other else "")
        + "; no gradient was changed on any rank"
    )
