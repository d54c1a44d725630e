"""Autograd stands aside while gradients are clipped."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def without_grad(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Runs a function without recording for autograd.

    Not while it is traced: there the work is done by operators that autograd does not see, and an
    error inside a compiled graph would leave grad mode off.
    """

    @functools.wraps(function)
    def wrapper(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        torch._C._set_grad_enabled(False)  # a quarter of the time of a context manager
        try:
            return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(True)

    return wrapper
