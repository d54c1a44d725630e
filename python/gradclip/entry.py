"""The way into every public function that may go over ranks.

Whatever goes wrong before gradients are read, from the arguments to the list of parameters, is
reported to all ranks wherever this rank can tell who they are: by `group=`, by `reduce=`, or by a
DTensor among what was passed. A rank that cannot tell raises alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

import gradclip
from gradclip import arguments
from gradclip.parameters import Parameters, ParametersLike, listed
from gradclip.sharding import clip as sharded
from gradclip.sharding import session as sessions
from gradclip.sharding.options import DISTINCT_DIMS, Sharding

if TYPE_CHECKING:
    from gradclip.sharding.session import Session

Asked = TypeVar("Asked")

_OPTIONS = ("group", "reduce", "plain", "distinct_dims", "replicas", "check_replicas")


def options(
    group: object,
    reduce: object,
    plain: object,
    distinct_dims: object,
    replicas: object,
    check_replicas: object,
    unknown: Mapping[str, Any],
) -> Sharding:
    """The options about ranks that are not the defaults, with unknown keyword arguments kept.

    `enter` refuses the unknown ones, so that all ranks learn of it.
    """
    chosen: Any = dict(unknown)
    passed = group, reduce, plain, distinct_dims, replicas, check_replicas
    for name, value in zip(_OPTIONS, passed, strict=True):
        if value is not None and not (type(value) is tuple and value == DISTINCT_DIMS):
            chosen[name] = value
    return chosen  # type: ignore[no-any-return]


def enter(
    function: str,
    parameters: ParametersLike,
    attribute: str | None,
    sharding: Sharding,
    check: Callable[[], Asked],
) -> tuple[Parameters, Session | None, Asked]:
    """What a call is about: its parameters, its session if it has one, and its checked arguments.

    Args:
        function: how errors call the function.
        parameters: as the caller passed them; an iterator is walked once.
        attribute: where gradients are found; None for raw gradients.
        sharding: the options about ranks.
        check: checks and returns the other arguments.

    Raises:
        ShardedClipError: on every rank alike, what this one refuses, when there are others.
    """
    walked: list[Any] = []
    try:
        asked = check()
        if hasattr(parameters, "__next__"):
            iterator: Any = parameters
            walked.extend(iterator)  # keeps what came before an error
        given = listed(walked or parameters)
        if attribute is not None:
            arguments.attribute(attribute)
        if sharding:
            sharding = _checked(function, parameters, sharding)
        return given, sessions.session_for(given, attribute, sharding), asked
    except Exception as cause:
        session = sessions.session_of_refusal(_readable(walked or parameters), sharding)
        if session is not None:
            sharded.refuse(session, function, cause)
        raise


def _checked(function: str, parameters: object, sharding: Sharding) -> Sharding:
    """The options about ranks without unknown ones, and with what the parameters say of them."""
    if not sharding.keys() <= set(_OPTIONS):
        known = arguments.names_of(getattr(gradclip, function))
        arguments.refuse_unknown(function, sharding, known)
    if "group" in sharding and is_data_parallel(parameters):
        return {"plain": "replicated", **sharding}
    return sharding


def is_data_parallel(parameters: object) -> bool:
    """Whether these are the parameters of a module whose ranks hold replicas of all of them."""
    return isinstance(parameters, torch.nn.parallel.DistributedDataParallel)


def _readable(parameters: object) -> Parameters:
    """The tensors in a list that holds other things too."""
    try:
        if isinstance(parameters, torch.nn.Module):
            parameters = list(parameters.parameters())
        elif isinstance(parameters, Mapping):
            parameters = list(parameters.values())
        elif isinstance(parameters, Iterator):
            parameters = list(parameters)
    except Exception:
        parameters = ()
    entries = parameters if isinstance(parameters, (list, tuple)) else (parameters,)
    flat = [part for entry in entries for part in (entry if isinstance(entry, tuple) else (entry,))]
    return Parameters.of([part for part in flat if isinstance(part, torch.Tensor)])
