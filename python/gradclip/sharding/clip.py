"""Total norms and clipping over ranks, for parameters that have a session."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from gradclip import _core, arguments, engine, gradients, totals
from gradclip.gradients import Gradients
from gradclip.parameters import Parameters
from gradclip.settings import Settings
from gradclip.sharding import absent, compat, deferred, placements
from gradclip.sharding.absent import ABSENT
from gradclip.sharding.contribution import Contribution
from gradclip.sharding.deferred import DeviceEngine
from gradclip.sharding.exchange import Exchange
from gradclip.sharding.failure import ShardedClipError, raise_unheard
from gradclip.sharding.session import Session, unique
from gradclip.sharding.slots import agreed_slots


def clip_(
    session: Session,
    given: Parameters,
    settings: Settings,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, float | torch.Tensor]:
    """Clip over all ranks; the total norm before, as a tensor, and the coefficient.

    With a loss scale S the stored gradients are S times the true ones: the total is that of the
    true ones, and the gradients end up clipped and divided by S. On a device both results are
    tensors that the host has not read.

    Raises:
        ShardedClipError: on every rank alike, before any gradient was touched; on a device, other
            ranks than the one that failed raise at their next call.
    """
    exchange = _opened(session, given, settings)
    state = session.deferred
    if not state.waits and (engine_ := _device_engine(exchange)):
        result = state.clip_(engine_, exchange.mine, session.plan.transport.device)
        dtype = dtype or (torch.float64 if state.double else torch.float32)
        return totals.from_result(result.view(torch.float32), dtype), result[1]
    state.waits = True
    total, coefficient, factor = _core.clip_outcome(
        _total(exchange), settings.norm_type, settings.max_norm, settings.eps, settings.scale
    )
    engine.scale_(_read(exchange), factor)
    state.double, state.waits = exchange.double, False
    return _tensor(exchange, given, total, dtype), coefficient


def check(session: Session) -> None:
    """Raise what the last clip came to on a device, if it came to nothing good.

    Raises:
        ShardedClipError: as `clip_`.
    """
    verdict = session.deferred.earlier()
    if verdict is not None and verdict.bad:
        raise_unheard(verdict, None, session.plan.transport.label)


def _opened(session: Session, given: Parameters, settings: Settings) -> Exchange:
    """The exchange of a call, once an earlier one that went wrong was told."""
    exchange = Exchange(Contribution(session.plan, settings, unique(given)))
    try:
        if not _capturing():
            check(session)
    except ShardedClipError as earlier:
        exchange.give_up(earlier)
        raise
    return exchange


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _device_engine(exchange: Exchange) -> DeviceEngine | None:
    mine = exchange.mine
    if mine.local is None or not mine.deferrable():
        return None
    return deferred.engine_for(mine.local.gradients, exchange.transport.device)


def total_norm(
    session: Session,
    given: Parameters,
    settings: Settings,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The total norm over all ranks, the same bits on each."""
    exchange = _opened(session, given, settings)
    return _tensor(exchange, given, _total(exchange), dtype)


def each_norm(
    session: Session, given: Parameters, norm_type: float, dtype: torch.dtype | None
) -> torch.Tensor:
    """The norm of each parameter of this rank's list, over all ranks that hold pieces of it."""
    if session.slots is None:
        session.slots = agreed_slots(session.plan)
    slot_of = session.slots.of(session.plan)
    parameters = unique(given)
    slots = (session.slots.total, slot_of)
    exchange = Exchange(Contribution(session.plan, Settings(norm_type), parameters, slots))
    norms = exchange.totals()
    by_id = {
        id(parameter): norms[slot_of[id(entry)]]
        for parameter, entry in zip(parameters, session.plan.entries, strict=True)
    }
    each = [by_id[id(parameter)] for parameter in given.tensors]
    dtype = dtype or (torch.float64 if exchange.double else torch.float32)
    return torch.tensor(each, dtype=dtype, device=_device(exchange, given))


def local_gradients(given: Parameters, attribute: str | None, linear: bool = True) -> Gradients:
    """A list's gradients to be changed in place without communication: of DTensors what is local.

    Args:
        given: parameters, or gradients when `attribute` is None.
        attribute: where gradients are found.
        linear: whether the change commutes with sums, so that partial gradients may take it.

    Raises:
        AttributeError: a parameter without the attribute.
        ValueError: a partial gradient whose change needs its sum first.
    """
    if given.are_plain:
        return gradients.given(given) if attribute is None else gradients.of(given, attribute)
    if attribute is not None:
        arguments.attribute(attribute)
    found: dict[int, tuple[torch.Tensor, str]] = {}
    for position, tensor in enumerate(given.tensors):
        gradient: Any = tensor if attribute is None else getattr(tensor, attribute, ABSENT)
        if gradient is ABSENT:
            absent.refuse(given.tensors, str(attribute), given.names)
        if gradient is None or id(tensor) in found:
            continue
        name = given.name(position).strip("`")
        found[id(tensor)] = (_local(gradient, given.name(position), linear), name)
    listed = list(found.values())
    return gradients.given(Parameters.of([t for t, _ in listed], [name for _, name in listed]))


def _local(gradient: torch.Tensor, name: str, linear: bool) -> torch.Tensor:
    if not compat.is_dtensor(gradient):
        return gradient
    for placement in compat.placements_of(gradient):
        meaning = placements.meaning(placement)
        if meaning.startswith("partial") and not linear:
            raise ValueError(
                f"gradient of {name} is placed {placement}: its sum is still pending; redistribute"
                " it before clipping values"
            )
    return compat.local_tensor(gradient)


def _read(exchange: Exchange) -> Gradients:
    assert exchange.mine.local is not None, "a rank that failed has raised"
    return exchange.mine.local.gradients


def _total(exchange: Exchange) -> float:
    (total,) = exchange.totals()
    asked = exchange.mine.settings
    if asked.error_if_nonfinite and not math.isfinite(total):
        raise ShardedClipError(
            f"The total norm of order {asked.norm_type} for gradients from `parameters` is"
            " non-finite, so it cannot be clipped. To disable this error and scale the gradients by"
            " the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    return total


def _device(exchange: Exchange, given: Parameters) -> torch.device:
    tensors: Sequence[torch.Tensor] = exchange.mine.gathered.tensors
    return tensors[0].device if tensors else given.device


def _tensor(
    exchange: Exchange, given: Parameters, total: float, dtype: torch.dtype | None
) -> torch.Tensor:
    dtype = dtype or (torch.float64 if exchange.double else torch.float32)
    return totals.tensor_of(total, dtype, _device(exchange, given))
