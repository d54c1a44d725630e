"""Autograd, Dynamo and the caller's floating-point mode stand aside in every public function."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from gradclip import _core, arguments

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame


def without_grad(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Runs a public function without recording for autograd, in the default floating-point mode.

    Misspelt arguments are named. The mode is the thread's: to nearest, subnormals kept.
    `torch.set_flush_denormal(True)` and C's `fesetround` change it, and with it the bits of torch
    operations; it is put back at the end.

    Not while it is traced: there the work is done by operators that autograd does not see, and an
    error inside a compiled graph would leave grad mode off. Where Dynamo gave a caller up, it would
    go on with the functions that are called from here; they are not written for it.
    """

    @functools.wraps(function)
    def wrapper(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        dynamo = _set_eval_frame(None)
        records = torch.is_grad_enabled()
        mode = _core.standard_mode()
        if records:
            torch._C._set_grad_enabled(False)  # a quarter of the time of a context manager
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                arguments.refuse_misspelt(function, kwargs)  # no line of the function has run
            raise
        finally:
            _core.restore_mode(mode)
            if records:
                torch._C._set_grad_enabled(True)
            _set_eval_frame(dynamo)

    return wrapper
