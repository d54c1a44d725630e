"""The way of an error: found on some ranks, raised with the same message on all.

A good clip needs none of this: the vector says that nothing failed. When it says that something
did, every rank knows, so every rank may take part in the further rounds that carry the message.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from gradclip.sharding.agreement import Verdict
from gradclip.sharding.errors import UNCHANGED, ShardedClipError, describe, kind_of, sharded_error
from gradclip.sharding.transport import Transport

_TEXT_BYTES = 1024
_FIRST = 2**40


def agree_on_message(transport: Transport, message: str | None) -> str | None:
    """The message of the lowest rank that has one, on every rank (two rounds)."""
    if transport.is_dry:
        return message
    bid = _FIRST - transport.rank if message is not None else 0
    best = int(transport.max_(torch.tensor([bid], dtype=torch.int64, device="cpu")).item())
    if best == 0:
        return None
    text = torch.zeros(_TEXT_BYTES, dtype=torch.int64, device="cpu")
    if message is not None and bid == best:
        spelled = message.encode(errors="backslashreplace")[:_TEXT_BYTES]
        text[: len(spelled)] = torch.tensor(list(spelled), dtype=torch.int64, device="cpu")
    received = bytes(byte % 256 for byte in transport.sum_(text).tolist())
    return received.rstrip(b"\0").decode(errors="ignore")


def raise_failure(transport: Transport, cause: BaseException | None) -> NoReturn:
    """Raise on every rank what the lowest failing rank found; `cause` is this rank's own."""
    message = None
    if cause is not None:
        message = f"{kind_of(cause)}\n{transport.label}: {describe(cause)}"
    agreed = agree_on_message(transport, message) or "\na rank failed"
    kind, _, text = agreed.partition("\n")
    raise sharded_error(f"{text}; {UNCHANGED}", kind) from cause


def raise_agreed(transport: Transport, message: str | None, otherwise: str) -> NoReturn:
    """Raise on every rank the message of the lowest rank that has one."""
    raise ShardedClipError(f"{agree_on_message(transport, message) or otherwise}; {UNCHANGED}")


def raise_from_verdict(verdict: Verdict, cause: BaseException | None, label: str) -> NoReturn:
    """Raise what the vector alone says, where some ranks take part in no further round now."""
    if cause is not None:
        message = f"{label}: {describe(cause)}"
    elif verdict.failures:
        who = "ranks" if verdict.failed_rank is None else f"rank {verdict.failed_rank}"
        message = f"clipping failed on {who}; see the traceback there"
    elif verdict.disagreements:
        message = f"ranks disagree about {', '.join(verdict.disagreements)}"
    elif not verdict.outline_agrees:
        message = (
            "ranks list different parameters, or replicas of a gradient differ in shape or dtype or"
            " are missing; check_replicas=True names them"
        )
    elif verdict.pending or not verdict.pending_agrees:
        message = "the sum of a gradient is pending on some ranks only"
    else:
        message = "replicas of a gradient differ between ranks; check_replicas=True names them"
    raise sharded_error(f"{message}; {UNCHANGED}", kind_of(cause)) from cause


def raise_disagreement(
    transport: Transport, subjects: tuple[str, ...], description: str
) -> NoReturn:
    """Raise on every rank how the lowest rank's call differs from the next that differs."""
    own = f"{transport.label} {description}"
    first = agree_on_message(transport, own) or own
    differs = first.partition(" ")[2].partition(" ")[2] != own.partition(" ")[2].partition(" ")[2]
    other = agree_on_message(transport, own if differs else None)
    raise ShardedClipError(
        f"ranks disagree about {', '.join(subjects)}: {first}"
        + (f", {other}" if other else "")
        + f"; {UNCHANGED}"
    )
