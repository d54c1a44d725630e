"""Magnitudes as the bit patterns of float64, by integer operations.

Order-preserving, exact for every supported type, and out of reach of `torch.set_flush_denormal`:
float arithmetic would read subnormal elements as zero there.
"""

import torch

from .double_double import hypotenuse

INFINITY = 0x7FF << 52
"""The bit pattern of +Inf; larger ones are NaN."""

_SIGN = 1 << 63
_INFINITY32 = 0xFF << 23
_REBIAS = 1023 - 127


def magnitude_bits(piece: torch.Tensor) -> torch.Tensor:
    """|x| of every element of a float32 or float64 tensor, as float64 bits in int64[n]."""
    if piece.dtype == torch.float64:
        return (piece.view(torch.int64) & (_SIGN - 1)).reshape(-1)
    bits = piece.view(torch.int32).to(torch.int64).reshape(-1) & 0x7FFF_FFFF
    normal = (bits << 29) + (_REBIAS << 52)
    subnormal = as_bits(bits.to(torch.float64) * 2.0**-149)
    finite = torch.where(bits < 1 << 23, subnormal, normal)
    return torch.where(bits >= _INFINITY32, bits + (INFINITY - _INFINITY32), finite)


def modulus_bits(piece: torch.Tensor) -> torch.Tensor:
    """|z| of every element of a complex tensor, as float64 bits in int64[n].

    The root of the double-double sum of squares of both parts, these divided by a power of two that
    brings the larger into [1, 2), so nothing overflows or underflows on the way. A NaN in either
    part makes |z| NaN.
    """
    parts = magnitude_bits(torch.view_as_real(piece)).reshape(-1, 2)
    larger = parts.amax(dim=1)
    exponent = exponents(larger)
    scaled = scale_by_power(significands(parts).to(torch.float64), units(parts) - exponent[:, None])
    modulus = as_bits(scale_by_power(hypotenuse(scaled[:, 0], scaled[:, 1]), exponent))
    return torch.where((larger == 0) | (larger >= INFINITY), larger, modulus)


def as_values(bits: torch.Tensor) -> torch.Tensor:
    """The float64 numbers behind bit patterns."""
    return bits.view(torch.float64)


def as_bits(values: torch.Tensor) -> torch.Tensor:
    """The bit patterns of float64 numbers."""
    return values.view(torch.int64)


def significands(bits: torch.Tensor) -> torch.Tensor:
    """The integers m with |x| = m * 2**(q - 1075), where q is the exponent field and at least 1."""
    fraction = bits & ((1 << 52) - 1)
    return torch.where(bits >> 52 > 0, fraction | 1 << 52, fraction)


def units(bits: torch.Tensor) -> torch.Tensor:
    """The exponents that go with `significands`: |x| = m * 2**unit."""
    return (bits >> 52).clamp_(min=1) - 1075


def exponents(bits: torch.Tensor) -> torch.Tensor:
    """floor(log2 |x|) of normal numbers; -1022 for smaller ones."""
    return (bits >> 52).clamp_(min=1) - 1023


def scale_by_power(values: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Values times 2**exponent, in two factors since one may be out of range."""
    half = exponent >> 1
    return values * _power_of_two(half) * _power_of_two(exponent - half)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    return as_values((exponent.clamp(-1022, 1023) + 1023) << 52)
