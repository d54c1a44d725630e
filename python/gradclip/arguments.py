"""Checks of arguments; a refusal names the argument, the value and the remedy."""

import difflib
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from gradclip import rounding
from gradclip.describe import described
from gradclip.settings import Settings

_LIMIT = "a number >= 0 (inf changes nothing)"

_ELSEWHERE = {
    "norm": "norm_type",
    "ord": "norm_type",
    "p": "norm_type",
    "clip": "max_norm",
    "clip_norm": "max_norm",
    "clip_val": "max_norm",
    "clip_value": "max_norm",
    "grad_clip": "max_norm",
    "gradient_clip_val": "max_norm",
    "max_grad_norm": "max_norm",
    "max_gradient_norm": "max_norm",
    "grad_scale": "scale",
    "grad_scaler": "scale",
    "loss_scale": "scale",
    "scaler": "scale",
    "mesh": "group",
    "pg": "group",
    "process_group": "group",
    "module": "parameters",
    "params": "parameters",
    "tensors": "parameters",
}
"""What other libraries call arguments; difflib alone would miss these or take them for others."""


def number(value: float | str | Tensor, name: str, expected: str = "a number") -> float:
    """An argument as a float.

    Raises:
        TypeError: not a number, or a number whose conversion raises.
        ValueError: a tensor of several elements, a string that is not a number, or a number beyond
            the range of float64.
    """
    if type(value) is float:
        return value
    if _is_tensor(value) and value.numel() != 1:
        raise ValueError(
            f"`{name}` has shape {tuple(value.shape)}; expected a number or a 0-dim tensor"
        )
    try:
        return _converted(value)
    except Exception as error:  # whatever a value's own conversion raises
        raise _not_a_number(value, name, expected, error) from error


def _is_tensor(value: object) -> TypeGuard[Tensor]:
    """`isinstance` asks an object for `__class__`, which may raise."""
    return issubclass(type(value), Tensor)


def _converted(value: Any) -> float:
    """`float(value)`, but for complex numbers, of which some drop their imaginary part."""
    if isinstance(value, int | str):
        return float(value)
    if isinstance(value, Tensor):
        value = value.detach()
        is_complex = value.is_complex()
    else:
        is_complex = isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real)
    if is_complex:
        raise TypeError("complex numbers have no order")
    return float(value)


def _not_a_number(value: object, name: str, expected: str, error: Exception) -> Exception:
    if isinstance(error, OverflowError):
        return ValueError(f"`{name}` is {described(value)}; expected {expected} that float64 holds")
    kind = ValueError if issubclass(type(value), str) else TypeError
    is_usual = isinstance(error, TypeError | ValueError | RuntimeError)
    cause = "" if is_usual else f", whose conversion raises {type(error).__name__}"
    remedy = f"expected {expected}"
    if hasattr(type(value), "get_scale"):
        remedy = (
            "pass scaler.get_scale(); before scaler.step(optimizer), which divides by itself, call "
            "scaler.unscale_(optimizer) and pass no scale"
        )
    return kind(f"`{name}` is {described(value)}{cause}; {remedy}")


def flag(value: object, name: str) -> bool:
    """An argument as a bool, by its truth value; None is False.

    Raises:
        TypeError: a string, as "False" is true, or a value without a truth value.
    """
    if isinstance(value, bool):
        return value
    try:
        if not isinstance(value, str | bytes):
            return bool(value)
    except Exception as error:
        raise TypeError(f"`{name}` is {described(value)}; expected True or False") from error
    raise TypeError(f"`{name}` is {described(value)}; expected True or False")


def refuse_unknown(function: str, unknown: Mapping[str, object], known: Sequence[str]) -> None:
    """Refuses keyword arguments that a function does not have.

    Args:
        function: its name.
        unknown: keyword arguments that were passed; those it has may be among them.
        known: the names of all its arguments.

    Raises:
        TypeError: the first unknown argument, the nearest known one, and all known ones.
    """
    for name in unknown:
        if name not in known:
            raise TypeError(
                f"{function}() got an unknown argument `{name:.60}`{_hint(name, known)} Its "
                f"arguments are {', '.join(known)}"
            )


def refuse_misspelt(function: Callable[..., object], keywords: Mapping[str, object]) -> None:
    """`refuse_unknown` for a call that Python itself refused.

    There a misspelt name of a required argument is a missing argument, and the name is not told.
    """
    name = function.__qualname__.removesuffix(".__init__").rpartition(".")[-1]
    refuse_unknown(name, keywords, names_of(function))


def names_of(function: Callable[..., object]) -> tuple[str, ...]:
    """The names of the arguments of a function, in its order."""
    arguments = inspect.signature(function).parameters.values()
    named = [each.name for each in arguments if each.kind is not each.VAR_KEYWORD]
    return tuple(name for name in named if name != "self")


def _hint(name: str, known: Sequence[str]) -> str:
    """The end of a sentence, with its mark."""
    if name in ("foreach", "fused"):
        return f"; `{name}` can be dropped, as there is one implementation."
    other = _ELSEWHERE.get(name.lower())
    if other in known:
        return f"; did you mean `{other}`?"
    return suggestion(name, known) or "."


def suggestion(name: str, known: Iterable[str]) -> str:
    """The known name that is nearest to another, as the end of a sentence; empty if none is near.

    Upper and lower case count as the same letter.
    """
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean `{by_lower[near[0]]}`?" if near else ""


def coefficient(value: float | Tensor) -> float | Tensor:
    """A coefficient as a float; a tensor on a device stays there.

    Raises:
        ValueError: a tensor of several elements.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type != "cpu":
        return value.reshape(())
    return number(value, "coefficient")


def limit(value: float | Tensor, name: str) -> float:
    """`max_norm` or `clip_value` as a float that is at least 0.

    Raises:
        ValueError: negative or NaN.
    """
    checked = number(value, name, _LIMIT)
    if not checked >= 0:
        raise ValueError(f"`{name}` is {checked}; expected {_LIMIT}")
    return abs(checked)  # -0.0 is 0.0


def order(norm_type: float | str | Tensor) -> float:
    """`norm_type` as a float; the strings "inf" and "-inf" are numbers too, as for torch.

    Raises:
        ValueError: NaN.
    """
    p = number(norm_type, "norm_type")
    if math.isnan(p):
        raise ValueError("`norm_type` is nan; pass a number such as 2.0, 1.0, 0.0 or inf")
    return abs(p) if p == 0 else p  # -0.0 is 0.0


def epsilon(eps: float | Tensor) -> float:
    """`eps` as a float that is at least 0 and finite.

    Raises:
        ValueError: negative, infinite or NaN.
    """
    checked = number(eps, "eps")
    if not 0 <= checked < math.inf:
        raise ValueError(f"`eps` is {checked}; expected a finite number >= 0")
    return abs(checked)  # -0.0 is 0.0


def total(value: float | Tensor) -> float:
    """`total_norm` as a float; NaN and inf pass, as they do for torch.

    Raises:
        ValueError: negative, such as a -1 that marks an overflow.
    """
    norm = number(value, "total_norm")
    if norm < 0:
        raise ValueError(
            f"`total_norm` is {norm}; expected a norm >= 0, so skip the step if it marks an "
            "overflow"
        )
    return norm


def loss_scale(scale: float | Tensor | None) -> float:
    """`scale` as a float; None is 1.

    Raises:
        ValueError: not positive, infinite, NaN, or so large or small that float32 gradients
            divided by it would lose digits.
    """
    checked = 1.0 if scale is None else number(scale, "scale")
    if not 2.0**-126 <= checked <= 2.0**126:
        raise ValueError(
            f"`scale` is {checked}; expected a positive finite loss scale, from 2**-126 to 2**126"
        )
    return checked


def result_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """`dtype` of the returned norm.

    Raises:
        TypeError: no real floating dtype, or one that a single number has no place in.
    """
    if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in rounding.DTYPES):
        raise TypeError(
            f"`dtype` is {described(dtype)}; expected a floating dtype of single numbers, such as"
            " torch.float64 or torch.bfloat16"
        )
    return dtype


def settings(
    norm_type: float | str | Tensor,
    max_norm: float | Tensor = math.inf,
    eps: float | Tensor = 1e-6,
    scale: float | Tensor | None = None,
    error_if_nonfinite: object = False,
) -> Settings:
    """The numbers of a clip; equal arguments give equal settings, -0.0 for 0.0 or 1 for True.

    Raises:
        TypeError, ValueError: as `order`, `limit`, `epsilon`, `loss_scale` and `flag`.
    """
    return Settings(
        order(norm_type),
        limit(max_norm, "max_norm"),
        epsilon(eps),
        loss_scale(scale),
        flag(error_if_nonfinite, "error_if_nonfinite"),
    )


def attribute(grad: str) -> str:
    """`grad`, the name of the attribute that holds gradients.

    Raises:
        TypeError: no string.
    """
    if not isinstance(grad, str):
        raise TypeError(
            f'`grad` is {described(grad)}; expected the name of an attribute, such as "grad"'
        )
    return grad
