"""Checks of numbers that callers pass; a refusal names the argument, the value and the remedy."""

import math

import torch
from torch import Tensor

from gradclip import rounding
from gradclip.settings import Settings


def number(value: float | str | Tensor, name: str) -> float:
    """An argument as a float.

    Raises:
        TypeError: no number.
        ValueError: a tensor of several elements, or a word that is no number.
    """
    if type(value) is float:
        return value
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(
            f"`{name}` has shape {tuple(value.shape)}; expected a number or a 0-dim tensor"
        )
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = ValueError if isinstance(value, str) else TypeError
        raise kind(f"`{name}` is {value!r}; expected a number") from error


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
    checked = number(value, name)
    if not checked >= 0:
        raise ValueError(f"`{name}` is {checked}; expected a number >= 0 (inf changes nothing)")
    return checked


def order(norm_type: float | str) -> float:
    """`norm_type` as a float; the strings "inf" and "-inf" are numbers too, as for torch.

    Raises:
        ValueError: NaN.
    """
    p = number(norm_type, "norm_type")
    if math.isnan(p):
        raise ValueError("`norm_type` is nan; pass a number such as 2.0, 1.0, 0.0 or inf")
    return p


def epsilon(eps: float) -> float:
    """`eps` as a float that is at least 0 and finite.

    Raises:
        ValueError: negative, infinite or NaN.
    """
    checked = number(eps, "eps")
    if not 0 <= checked < math.inf:
        raise ValueError(f"`eps` is {checked}; expected a finite number >= 0")
    return checked


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
            f"`dtype` is {dtype!r:.80}; expected a floating dtype of single numbers, such as "
            "torch.float64 or torch.bfloat16"
        )
    return dtype


def settings(
    norm_type: float,
    max_norm: float,
    eps: float,
    scale: float | Tensor | None,
    error_if_nonfinite: bool,
) -> Settings:
    """The numbers of a clip.

    Raises:
        TypeError, ValueError: as `order`, `limit`, `epsilon` and `loss_scale`.
    """
    return Settings(
        order(norm_type),
        limit(max_norm, "max_norm"),
        epsilon(eps),
        loss_scale(scale),
        error_if_nonfinite,
    )


def attribute(grad: str) -> str:
    """`grad`, the name of the attribute that holds gradients.

    Raises:
        TypeError: no string.
    """
    if not isinstance(grad, str):
        raise TypeError(f'`grad` is {grad!r}; expected the name of an attribute, such as "grad"')
    return grad
