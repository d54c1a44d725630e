"""Total norms and clipping over ranks, for parameters that have a session."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from gradclip import _core, arguments, engine, gradients, nonfinite, rounding, totals
from gradclip.gradients import Gradients
from gradclip.parameters import Parameters
from gradclip.settings import Settings
from gradclip.sharding import (
    absent,
    compat,
    deferred,
    exchange,
    per_parameter,
    placements,
    raising,
)
from gradclip.sharding.absent import ABSENT
from gradclip.sharding.contribution import Contribution, Request, prepare, refusal
from gradclip.sharding.deferred import DeviceEngine
from gradclip.sharding.errors import ShardedClipError
from gradclip.sharding.exchange import Outcome
from gradclip.sharding.session import Session, unique


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
    mine = _opened(session, given, Request("clip_", settings))
    state = session.deferred
    if not state.waits and (engine_ := _device_engine(mine)):
        result = state.clip_(engine_, mine)
        session.schedule.advance(verified_fresh=False)
        dtype = dtype or (torch.float64 if state.double else torch.float32)
        return totals.from_result(result.view(torch.float32), dtype), result[1]
    state.waits = True
    exact, outcome = _total(mine)
    total, coefficient, factor = _core.clip_outcome(
        exact, settings.norm_type, settings.max_norm, settings.eps, settings.scale
    )
    assert mine.local is not None, "a rank that failed has raised"
    engine.scale_(mine.local.gradients, factor)
    state.double, state.waits = outcome.double, False
    return _tensor(mine, given, total, dtype, outcome), coefficient


def check(session: Session) -> None:
    """Raise what the last clip came to on a device, if it failed.

    Raises:
        ShardedClipError: as `clip_`.
    """
    verdict = session.deferred.earlier()
    if verdict is None:
        return
    if verdict.needs_rounds:
        raising.raise_from_verdict(verdict, None, session.plan.transport.label)
    if verdict.comparing:
        session.schedule.restart()


def refuse(session: Session, function: str, cause: Exception) -> None:
    """Let every rank know that this one refused its arguments.

    Raises:
        ShardedClipError: on every rank alike.
    """
    exchange.total(refusal(session, Request(function, Settings(2.0)), cause))


def _opened(session: Session, given: Parameters, request: Request) -> Contribution:
    """This rank's part in a call, once an earlier one that went wrong was reported."""
    try:
        if not _capturing():
            check(session)
    except ShardedClipError as earlier:
        exchange.give_up(refusal(session, request, earlier))
        raise
    return prepare(session, unique(given), request)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _device_engine(mine: Contribution) -> DeviceEngine | None:
    if mine.local is None or not mine.deferrable():
        return None
    return deferred.engine_for(mine.local.gradients, mine.plan.transport.device)


def total_norm(
    session: Session,
    given: Parameters,
    settings: Settings,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The total norm over all ranks, the same bits on each."""
    mine = _opened(session, given, Request("get_total_norm", settings))
    exact, outcome = _total(mine)
    return _tensor(mine, given, exact, dtype, outcome)


def each_norm(
    session: Session, given: Parameters, norm_type: float, dtype: torch.dtype | None
) -> torch.Tensor:
    """The norm of each parameter of this rank's list, over all ranks that hold parts of it."""
    mine = _opened(session, given, Request("grad_norms", Settings(norm_type)))
    norms, outcome = per_parameter.norms(mine)
    parameters = zip(unique(given), session.plan.entries, strict=True)
    by_id = {id(parameter): norms[entry] for parameter, entry in parameters}
    each = [by_id[id(parameter)] for parameter in given.tensors]
    dtype = dtype or (torch.float64 if outcome.double else torch.float32)
    return rounding.tensor_of(each, dtype, _device(mine, given))


def _total(mine: Contribution) -> tuple[float, Outcome]:
    exact, outcome = exchange.total(mine)
    if mine.request.settings.error_if_nonfinite and not math.isfinite(exact):
        _raise_non_finite(mine, outcome)
    return exact, outcome


def _raise_non_finite(mine: Contribution, outcome: Outcome) -> NoReturn:
    where = None
    if not outcome.deferred:
        where = raising.agree_on_message(mine.plan.transport, _non_finite_here(mine, outcome))
    raise ShardedClipError(
        f"The total norm of order {mine.request.settings.norm_type} for gradients from `parameters`"
        f" is non-finite, so it cannot be clipped{f': {where}' if where else ''}. To disable this"
        " error and scale the gradients by the non-finite norm anyway, set"
        " `error_if_nonfinite=False`"
    )


def _non_finite_here(mine: Contribution, outcome: Outcome) -> str | None:
    """This rank and what is not finite in the part that it counts; None where all is."""
    assert mine.local is not None, "a rank that failed has raised"
    try:
        parts = [mine.local, *([outcome.pieces.read()] if outcome.pieces else [])]
        described = [nonfinite.describe_nonfinite(part.gradients) for part in parts]
    except Exception as error:  # the error at hand matters more
        described = [f"{type(error).__name__} while looking for it"]
    found = "; ".join(filter(None, described))
    return f"{mine.plan.transport.label}: {found}" if found else None


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


def _device(mine: Contribution, given: Parameters) -> torch.device:
    tensors: Sequence[torch.Tensor] = [] if mine.gathered is None else mine.gathered.tensors
    return tensors[0].device if tensors else given.device


def _tensor(
    mine: Contribution,
    given: Parameters,
    total: float,
    dtype: torch.dtype | None,
    outcome: Outcome,
) -> torch.Tensor:
    dtype = dtype or (torch.float64 if outcome.double else torch.float32)
    return totals.tensor_of(total, dtype, _device(mine, given))
