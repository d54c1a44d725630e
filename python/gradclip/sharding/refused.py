"""The start of a call: what it is about, or its refusal, which every rank hears.

A rank that refuses its arguments takes part in the exchange all the same, wherever it can tell who
the others are: by `group=`, by `reduce=`, or by a DTensor among what it was given.
"""

from __future__ import annotations

import torch

from gradclip import arguments
from gradclip.parameters import Parameters, ParametersLike, listed
from gradclip.settings import Settings
from gradclip.sharding.contribution import Contribution
from gradclip.sharding.exchange import Exchange
from gradclip.sharding.session import (
    Session,
    Sharding,
    known_like,
    open_apart,
    session_for,
    unique,
)
from gradclip.sharding.slots import agreed_slots


def entered(
    parameters: ParametersLike, attribute: str | None, sharding: Sharding, each: bool = False
) -> tuple[Parameters, Session | None]:
    """The list of parameters of a call, and its session if it has one.

    Args:
        parameters: as the caller gave them.
        attribute: where gradients are found; None for raw gradients.
        sharding: the words about ranks.
        each: whether the call is about each parameter's own norm.

    Raises:
        ShardedClipError: on every rank alike, what this one refuses, when there are others.
    """
    try:
        given = listed(parameters)
    except Exception as refusal:
        _tell(refusal, _readable(parameters), False, attribute, sharding, each)
        raise
    try:
        if attribute is not None:
            arguments.attribute(attribute)
        return given, session_for(given, attribute, sharding)
    except Exception as refusal:
        _tell(refusal, given, True, attribute, sharding, each)
        raise


def tell_all_ranks(
    refusal: Exception,
    parameters: ParametersLike,
    attribute: str | None,
    sharding: Sharding,
    each: bool = False,
) -> None:
    """Let every rank hear that this one refused its arguments; nothing without other ranks.

    Raises:
        ShardedClipError: on every rank alike, when there are others.
    """
    given, session = entered(parameters, attribute, sharding, each)
    if session is not None:
        refuse(refusal, session, given, each)


def refuse(refusal: Exception, session: Session, given: Parameters, each: bool = False) -> None:
    """`tell_all_ranks` of a session."""
    slots = None
    if each:
        session.slots = session.slots or agreed_slots(session.plan, refusal)
        slots = session.slots.total, session.slots.of(session.plan)
    mine = Contribution(session.plan, Settings(2.0), unique(given), slots)
    mine.cause = refusal
    Exchange(mine).totals()


def _tell(
    refusal: Exception,
    given: Parameters,
    is_whole: bool,
    attribute: str | None,
    sharding: Sharding,
    each: bool,
) -> None:
    """`tell_all_ranks` where the call has no session, by an earlier one if it fits."""
    name = attribute if attribute is None or isinstance(attribute, str) else "grad"
    session = open_apart(given, name, sharding)
    if session is None:
        return
    known = known_like(session, given, is_whole)
    refuse(refusal, known or session, known.parameters() if known else given, each)


def _readable(parameters: object) -> Parameters:
    """The tensors in a list that holds other things too."""
    entries = parameters if isinstance(parameters, (list, tuple)) else ()
    flat = [part for entry in entries for part in (entry if isinstance(entry, tuple) else (entry,))]
    return Parameters.of([part for part in flat if isinstance(part, torch.Tensor)])
