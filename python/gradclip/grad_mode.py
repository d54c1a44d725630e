"""In every public function autograd stands aside, and so does the caller's floating-point mode."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from gradclip import _core

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def without_grad(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Runs a function without recording for autograd, in the default floating-point mode.

    The mode is the thread's: to nearest, subnormals kept. `torch.set_flush_denormal(True)` and C's
    `fesetround` change it, and with it the bits of torch operations; it is put back at the end.

    Not while it is traced: there the work is done by operators that autograd does not see, and an
    error inside a compiled graph would leave grad mode off.
    """

    @functools.wraps(function)
    def wrapper(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        records = torch.is_grad_enabled()
        mode = _core.standard_mode()
        if records:
            torch._C._set_grad_enabled(False)  # a quarter of the time of a context manager
        try:
            return function(*args, **kwargs)
        finally:
            _core.restore_mode(mode)
            if records:
                torch._C._set_grad_enabled(True)

    return wrapper
