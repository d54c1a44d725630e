"""Autograd stands aside while gradients are clipped."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from gradclip import arguments

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def without_grad(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Runs a public function without recording for autograd; misspelt arguments are named.

    Not while it is traced: there the work is done by operators that autograd does not see, and an
    error inside a compiled graph would leave grad mode off.
    """

    @functools.wraps(function)
    def wrapper(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        was_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # a quarter of the time of a context manager
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                arguments.refuse_misspelt(function, kwargs)  # no line of the function has run
            raise
        finally:
            torch._C._set_grad_enabled(was_enabled)

    return wrapper
