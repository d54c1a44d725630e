"""Checks of numbers that callers pass; a refusal names the argument, the value and the remedy."""

import math

import torch
from torch import Tensor


def limit(value: float | Tensor, name: str) -> float:
    """`max_norm` or `clip_value` as a float that is at least 0.

    Raises:
        ValueError: negative or NaN.
    """
    number = float(value)
    if not number >= 0:
        raise ValueError(f"`{name}` is {number}; expected a number >= 0 (inf changes nothing)")
    return number


def order(norm_type: float | str) -> float:
    """`norm_type` as a float; the strings "inf" and "-inf" are numbers too, as for torch.

    Raises:
        ValueError: NaN.
    """
    number = float(norm_type)
    if math.isnan(number):
        raise ValueError("`norm_type` is nan; pass a number such as 2.0, 1.0, 0.0 or inf")
    return number


def epsilon(eps: float) -> float:
    """`eps` as a float that is at least 0 and finite.

    Raises:
        ValueError: negative, infinite or NaN.
    """
    number = float(eps)
    if not 0 <= number < math.inf:
        raise ValueError(f"`eps` is {number}; expected a finite number >= 0")
    return number


def total(value: float | Tensor) -> float:
    """`total_norm` as a float; NaN and inf pass, as they do for torch.

    Raises:
        ValueError: negative, such as a -1 that marks an overflow.
    """
    number = float(value)
    if number < 0:
        raise ValueError(
            f"`total_norm` is {number}; expected a norm >= 0, so skip the step if it marks an "
            "overflow"
        )
    return number


def loss_scale(scale: float | Tensor | None) -> float:
    """`scale` as a float; None is 1.

    Raises:
        ValueError: not positive, infinite or NaN.
    """
    number = 1.0 if scale is None else float(scale)
    if not 0 < number < math.inf:
        raise ValueError(f"`scale` is {number}; expected a positive finite loss scale")
    return number


def result_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """`dtype` of the returned norm.

    Raises:
        TypeError: no real floating dtype.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"`dtype` is {dtype}; expected a floating dtype such as torch.float64")
    return dtype
