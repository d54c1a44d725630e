"""Where a Clipper's parameters come from: a Module, which is followed, or a list, which stays."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradclip import _core
from gradclip.parameters import Parameters, ParametersLike, listed, warn

_LEFT = (
    "only this Clipper still holds its parameters: the model has others, as after "
    "load_state_dict(assign=True) or to(); make a new Clipper, or make it of the Module, which it "
    "then follows"
)


class ModuleSource:
    """The parameters of a Module, listed anew when they are others than at the last call.

    To list them takes a microsecond or more for each, so the dictionaries behind the Module's
    attributes are compared with a snapshot instead: object by object, names and order too.

    Attributes:
        listed: the list as of the last call.
    """

    if_unused: ClassVar[str] = ""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.listed = listed(module)
        self._snapshot = _snapshot(module)

    def current(self) -> Parameters:
        """The list as of now; the same object as before if nothing changed."""
        if _references((self.module,)) <= _ALONE + 1:  # this object and the tuple
            warn("only this Clipper still holds its Module; make a new Clipper of the one in use")
        if self._snapshot is None or self._has_changed():
            found = listed(self.module)
            if found.nothing:
                warn(found.nothing)
            self._snapshot = _snapshot(self.module)
            if not _same(found, self.listed):
                self.listed = found
        return self.listed

    def _has_changed(self) -> bool:
        """Whether an entry is another object, or a parameter has become another class of tensor."""
        assert self._snapshot is not None
        is_current = _core.is_current(self._snapshot)
        return not is_current or _core.are_plain(self.listed.tensors) != self.listed.are_plain

    def __str__(self) -> str:
        return f"{type(self.module).__name__}, {_count(len(listed(self.module).tensors))}"


class ListSource:
    """A list of parameters that is never another.

    Attributes:
        listed: the list.
    """

    if_unused: ClassVar[str] = "; make a new Clipper if the model has other parameters by now"

    def __init__(self, parameters: ParametersLike) -> None:
        self.listed = listed(parameters)
        self._times = sum(tensor is self.listed.tensors[0] for tensor in self.listed.tensors)

    def current(self) -> Parameters:
        """The list; warns when nobody else holds any of its tensors: none can be used again."""
        tensors = self.listed.tensors
        if tensors and _references(tensors) < _ALONE + self._times and _are_left(tensors):
            warn(_LEFT)
        return self.listed

    def __str__(self) -> str:
        return _count(len(self.listed.tensors))


def _snapshot(module: nn.Module) -> tuple[Any, ...] | None:
    """What `_core.is_current` compares; None for a Module that lists parameters its own way."""
    if _overrides(module, "named_parameters") or _overrides(module, "_named_members"):
        return None
    entries: list[Any] = []
    for each in module.modules():
        for held in (each._parameters, each._modules):
            if type(held) is not dict or _overrides(each, "named_modules"):
                return None
            entries.append(held)
            for key, value in held.items():
                entries += (key, value)
    return tuple(entries)


def _overrides(module: nn.Module, method: str) -> bool:
    return method in vars(module) or getattr(type(module), method) is not getattr(nn.Module, method)


def _same(one: Parameters, other: Parameters) -> bool:
    """Whether two lists hold the same objects under the same names."""
    if (one.names, one.are_plain) != (other.names, other.are_plain):
        return False
    return list(map(id, one.tensors)) == list(map(id, other.tensors))


def _references(objects: tuple[object, ...]) -> int:
    """The reference count of the first of some objects."""
    return next(map(sys.getrefcount, objects))


_ALONE = _references((object(),))
"""The count of an object that only a tuple holds."""


def _are_left(tensors: tuple[Tensor, ...]) -> bool:
    """Whether no other object refers to any of these tensors, nor does torch itself."""
    times = Counter(map(id, tensors))
    counts = list(map(sys.getrefcount, tensors))  # before the loop refers to one
    if any(
        count >= _ALONE + times[id(tensor)] for count, tensor in zip(counts, tensors, strict=True)
    ):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return all(tensor._use_count() == 1 for tensor in tensors)


def _count(parameters: int) -> str:
    return f"{parameters} parameter{'' if parameters == 1 else 's'}"
