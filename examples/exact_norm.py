"""The 2-norm by whole numbers alone: slow, short, and right by inspection.

A value of at most 24 significant bits is m * 2**k with an integer m. The squares m * m are added
in groups of one k each, in integers, and the groups are joined in Python's unbounded integers, so
that nothing is rounded before the root.
"""

import math
from collections.abc import Iterable
from fractions import Fraction

import torch
from torch import Tensor

SIGNIFICANT_BITS = 24
LOWEST_EXPONENT = -160  # below frexp's exponent of the smallest float32 subnormal, -148
EXPONENTS = 320
HALF_SQUARE = 24  # squares have 48 bits; halves of 24 leave int64 room for 2**39 of them


def sum_of_squares(tensors: Iterable[Tensor]) -> Fraction:
    """The exact sum of x * x over float32, bfloat16 or float16 tensors of finite values."""
    return sum((_sum_of_squares(tensor.detach()) for tensor in tensors), Fraction(0))


def _sum_of_squares(tensor: Tensor) -> Fraction:
    mantissas, exponents = torch.frexp(tensor.reshape(-1).float())
    integers = (mantissas * 2**SIGNIFICANT_BITS).long()
    squares = integers * integers
    groups = exponents.long() - LOWEST_EXPONENT
    zeros = torch.zeros(EXPONENTS, dtype=torch.int64, device=tensor.device)
    upper = zeros.index_add(0, groups, squares >> HALF_SQUARE).tolist()
    lower = zeros.index_add(0, groups, squares & (2**HALF_SQUARE - 1)).tolist()
    halves = zip(upper, lower, strict=True)
    whole = sum(((high << HALF_SQUARE) + low) << 2 * k for k, (high, low) in enumerate(halves))
    return Fraction(whole) * Fraction(2) ** (2 * (LOWEST_EXPONENT - SIGNIFICANT_BITS))


def square_root(value: Fraction, bits: int = 200) -> Fraction:
    """The root of a non-negative rational, rounded down to about `bits` significant bits."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    shift = 2 * (bits - exponent // 2)
    scaled = value * Fraction(2) ** shift
    return Fraction(math.isqrt(scaled.numerator // scaled.denominator)) / Fraction(2) ** (
        shift // 2
    )


def error_in_ulps(value: float, exact: Fraction, dtype: torch.dtype) -> float:
    """How far a value lies from the exact one, in units of the last place of the dtype there."""
    bits = 1 - round(math.log2(torch.finfo(dtype).eps))
    exponent = math.frexp(float(exact))[1]
    return float(abs(Fraction(value) - exact) / Fraction(2) ** (exponent - bits))
