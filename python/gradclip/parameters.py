"""What callers pass as `parameters`, made into a list with names where there are any."""

import sys
import types
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from gradclip import _core, mistakes

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
        TypeError: not one of these, or an entry that is not a tensor.
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
        mistakes.refuse_entries(found.tensors, names)
    return found


def _walk(parameters: Iterable[Any]) -> Iterator[Any]:
    if not isinstance(parameters, list | tuple | types.GeneratorType):
        mistakes.refuse_containers(parameters)
    try:
        return iter(parameters)
    except TypeError as error:
        raise mistakes.not_iterable(parameters) from error


def is_exhausted(parameters: object) -> bool:
    """Whether this is a generator that has ended."""
    return isinstance(parameters, types.GeneratorType) and parameters.gi_frame is None


def nothing_in(parameters: object) -> str:
    """The warning for what was passed and lists nothing."""
    if isinstance(parameters, nn.Module):
        return f"{type(parameters).__name__} has no parameters: no gradient is read"
    if isinstance(parameters, types.GeneratorType):
        return "an empty or exhausted generator: no gradient is read; call model.parameters() again"
    return f"an empty {type(parameters).__name__}: no gradient is read"


def unzipped(entries: tuple[Any, ...]) -> tuple[list[str], tuple[Any, ...]]:
    """The names and the tensors of (name, tensor) pairs.

    Raises:
        TypeError: an entry is no such pair.
    """
    for position, entry in enumerate(entries):
        is_pair = isinstance(entry, tuple) and len(entry) == 2
        if not is_pair or not isinstance(entry[0], str):
            mistakes.refuse_pair(entry, position)
    return [name for name, _ in entries], tuple(tensor for _, tensor in entries)


def warn(message: str) -> None:
    """Warns at the line that called gradclip's public function."""
    warnings.warn(message, UserWarning, stacklevel=_frames_inside())


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
