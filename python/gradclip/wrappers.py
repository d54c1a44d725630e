"""Tensor subclasses that hold their elements in tensors of their own."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN = (Tensor, torch.nn.Parameter)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is exactly torch's, no subclass."""
    return type(tensor) in _PLAIN


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor has no memory of its own: torch operations go to what it wraps."""
    return not is_plain(tensor) and is_traceable_wrapper_subclass(tensor)


def waited(tensor: Tensor) -> Tensor:
    """The tensor behind an asynchronous collective, once that is done; others as they are."""
    pending: Any = tensor
    is_pending = not is_plain(tensor) and hasattr(pending, "elem") and hasattr(pending, "completed")
    return cast(Tensor, pending.wait()) if is_pending else tensor


def held(tensor: Tensor) -> list[Tensor]:
    """The tensors with memory behind a wrapper, all the way down; a tensor that is none, itself."""
    if not is_wrapper(tensor):
        return [tensor]
    names, _ = cast(Any, tensor).__tensor_flatten__()
    return [inner for name in names for inner in held(getattr(tensor, name))]


def to_list(vector: Tensor) -> list[int]:
    """The integers in a 1-dim tensor; of a wrapper, those that it stands for."""
    if is_wrapper(vector):
        return [int(element.item()) for element in vector.unbind()]
    integers: list[int] = vector.tolist()
    return integers
