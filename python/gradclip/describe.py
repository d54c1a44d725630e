"""How errors describe a value: in a few characters, and without failing themselves."""

import math
import types

import torch
from torch import Tensor

_LENGTH = 40
_DIGITS = 20


def described(value: object) -> str:
    """A short description of any value: numbers and strings as they are written, else the type.

    Of a foreign object only its type is read, as its repr may be huge, or raise.
    """
    if value is None or type(value) in (bool, float, complex, torch.dtype, torch.device):
        return repr(value)
    if type(value) is int:
        return _integer(value)
    if type(value) in (str, bytes):
        return _text(value)  # type: ignore[arg-type]
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, type):
        return f"the class {_name(value)}"
    if isinstance(value, types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        return f"the function {value.__name__:.{_LENGTH}}"
    return of_kind(value)


def of_kind(value: object) -> str:
    """The type of a value with its article: "an Adam"."""
    name = _name(type(value))
    return f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name}"


def _name(kind: type) -> str:
    return f"{kind.__name__:.{_LENGTH}}"


def _integer(value: int) -> str:
    """Python writes no int of more than 4300 digits."""
    digits = int(value.bit_length() * math.log10(2)) + 1
    return repr(value) if digits <= _DIGITS else f"an int of about {digits} digits"


def _text(value: str | bytes) -> str:
    return repr(value) if len(value) <= _LENGTH else f"{value[:_LENGTH]!r}..."


def _tensor(value: Tensor) -> str:
    """Nested tensors have no shape to write."""
    if value.is_nested:
        return "a nested tensor"
    device = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"a tensor of shape {tuple(value.shape)}{device}"
