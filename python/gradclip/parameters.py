"""What callers pass as `parameters`, made into a list with names where there are any."""

import sys
import types
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from gradclip import _core

ParametersLike: TypeAlias = nn.Module | Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]]


class Parameters(NamedTuple):
    """Parameters in the caller's order."""

    tensors: tuple[Tensor, ...]
    names: list[str] | None
    are_plain: bool
    """Whether all are exactly tensors or parameters of torch, none a subclass."""
    nothing: str = ""
    """What a warning says of an empty list."""

    @classmethod
    def of(cls, tensors: Iterable[Tensor], names: list[str] | None = None) -> "Parameters":
        """These tensors, with what they are called."""
        given = tuple(tensors)
        return cls(given, names, _core.are_plain(given))

    @property
    def device(self) -> torch.device:
        """Where a norm of no gradients belongs: the first parameter's device, else the CPU."""
        return self.tensors[0].device if self.tensors else torch.device("cpu")

    def name(self, position: int) -> str:
        """How errors call the parameter at a position."""
        return f"`{self.names[position]}`" if self.names else f"parameter {position}"


def listed(parameters: ParametersLike) -> Parameters:
    """The list behind a Module, a tensor, an iterable of tensors or of (name, tensor) pairs.

    An iterable is walked once. For an empty one `nothing` holds a warning, which is the caller's.

    Raises:
        TypeError: nothing of that kind, or an entry is no tensor.
    """
    if isinstance(parameters, Tensor):
        return Parameters.of((parameters,))
    given = parameters
    if isinstance(parameters, nn.Module):
        parameters = parameters.named_parameters()
    entries: tuple[Any, ...] = tuple(_walk(parameters))
    if not entries:
        return Parameters((), None, are_plain=True, nothing=nothing_in(given))
    names = None
    if isinstance(entries[0], tuple):
        names, entries = unzipped(entries)
    found = Parameters.of(entries, names)
    if not found.are_plain:
        _refuse_others(found)
    return found


def _walk(parameters: Iterable[Any]) -> Iterator[Any]:
    try:
        return iter(parameters)
    except TypeError as error:
        raise TypeError(
            f"`parameters` is {parameters!r:.80}; expected a Module, a tensor, or an iterable of "
            "tensors or of (name, tensor) pairs, such as model.named_parameters()"
        ) from error


def nothing_in(given: object) -> str:
    """The warning for what was passed and lists nothing."""
    if isinstance(given, nn.Module):
        return f"{type(given).__name__} has no parameters: no gradient is read"
    if isinstance(given, types.GeneratorType):
        return "a spent or empty generator: no gradient is read; pass model.parameters() anew"
    return f"an empty {type(given).__name__}: no gradient is read"


def unzipped(entries: tuple[Any, ...]) -> tuple[list[str], tuple[Any, ...]]:
    """The names and the tensors of (name, tensor) pairs.

    Raises:
        TypeError: an entry is no such pair.
    """
    for position, entry in enumerate(entries):
        is_pair = isinstance(entry, tuple) and len(entry) == 2
        if not is_pair or not isinstance(entry[0], str):
            raise TypeError(
                f"`parameters` begins with a tuple and holds no (name, tensor) pair at position "
                f"{position}; expected tensors alone, or pairs of a string and a tensor throughout"
            )
    return [name for name, _ in entries], tuple(tensor for _, tensor in entries)


def warn(message: str) -> None:
    """Warns at the line that called gradclip's public function."""
    warnings.warn(message, UserWarning, stacklevel=_frames_inside())


def _refuse_others(given: Parameters) -> None:
    entries: tuple[object, ...] = given.tensors
    for position, entry in enumerate(entries):
        if not isinstance(entry, Tensor):
            where = f" as {given.name(position)}" if given.names else ""
            raise TypeError(
                f"`parameters` holds {type(entry).__name__} at position {position}{where}; "
                "expected tensors, (name, tensor) pairs or a Module"
            )


def _frames_inside() -> int:
    depth = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame):
        frame = frame.f_back
        depth += 1
    return depth


def _is_inside(frame: types.FrameType) -> bool:
    """Whether a frame is gradclip's or torch's; code that a compiler made has no module."""
    module: str = frame.f_globals.get("__name__", "torch")
    return module.split(".")[0] in ("gradclip", "torch")
