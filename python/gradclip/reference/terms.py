"""What the elements of one slice add to the sums, for each norm type p."""

import math
from dataclasses import dataclass

import torch

from . import limbs
from .double_double import integer_power
from .magnitudes import INFINITY, as_bits, as_values, significands, units

SMALLEST_TERM = 2.0**-960
"""Powers outside these bounds are misfits: inside them the rests of double-double are exact."""

LARGEST_TERM = 2.0**1000


@dataclass(frozen=True)
class Norm:
    """A norm type p, and what magnitudes are divided by before they are raised to p."""

    p: float
    scale_exponent: int = 0
    divisor: float | None = None

    @property
    def is_scaled(self) -> bool:
        """Whether terms out of range are dropped instead of reported."""
        return self.scale_exponent != 0 or self.divisor is not None

    def scaled(self, values: torch.Tensor) -> torch.Tensor:
        """Values over the scale; a power of two in two factors, since one may be out of range."""
        if self.divisor is not None:
            return values / self.divisor
        if self.scale_exponent == 0:
            return values
        half = int(self.scale_exponent / 2)
        return values * 2.0**-half * 2.0 ** (half - self.scale_exponent)


def add(vector: torch.Tensor, bits: torch.Tensor, norm: Norm, *, is_narrow: bool) -> None:
    """Adds the terms of magnitudes (float64 bits, int64[n], n > 0) to the sums.

    `is_narrow`: every magnitude has at most 24 significant bits.
    """
    vector[limbs.NAN] += (bits > INFINITY).sum()
    if math.isinf(norm.p):
        _add_extreme(vector, bits, is_largest=norm.p > 0)
    elif norm.p == 0:
        vector[limbs.UNIT_LIMB] += (bits > 0).sum()
    elif limbs.is_tiny(norm.p):
        _add_tiny(vector, bits, norm)
    elif norm.p == 1:
        limbs.deposit(vector, _finite_significands(bits), units(bits))
    elif norm.p == 2:
        _add_squares(vector, bits, is_narrow=is_narrow)
    else:
        _add_powers(vector, bits, norm)
    limbs.spread(vector)


def _finite_significands(bits: torch.Tensor) -> torch.Tensor:
    return torch.where(bits < INFINITY, significands(bits), 0)


def _add_extreme(vector: torch.Tensor, bits: torch.Tensor, *, is_largest: bool) -> None:
    keys = torch.where(bits > INFINITY, limbs.NO_EXTREME, bits if is_largest else ~bits)
    vector[limbs.EXTREME] = torch.maximum(vector[limbs.EXTREME], keys.amax())


def _add_squares(vector: torch.Tensor, bits: torch.Tensor, *, is_narrow: bool) -> None:
    whole, unit = _finite_significands(bits), 2 * units(bits)
    if is_narrow:
        whole >>= 29
        limbs.deposit(vector, whole * whole, unit + 58)
        return
    high, low = whole >> 27, whole & ((1 << 27) - 1)
    limbs.deposit(vector, high * high, unit + 54)
    limbs.deposit(vector, high * low, unit + 28)
    limbs.deposit(vector, low * low, unit)


def _add_tiny(vector: torch.Tensor, bits: torch.Tensor, norm: Norm) -> None:
    """Magnitudes, and above them how many are not zero."""
    if norm.p < 0:
        vector[limbs.ZEROS] += (bits == 0).sum()
    limbs.deposit(vector, _finite_significands(bits), units(bits))
    vector[limbs.UNIT_OF_COUNT] += ((bits > 0) & (bits < INFINITY)).sum()


def _add_powers(vector: torch.Tensor, bits: torch.Tensor, norm: Norm) -> None:
    if norm.p < 0:
        vector[limbs.ZEROS] += (bits == 0).sum()
    scaled = norm.scaled(as_values(bits))
    is_integer = norm.p > 0 and norm.p == int(norm.p) and norm.p < 2**32
    term = integer_power(scaled, int(norm.p)) if is_integer else torch.pow(scaled, norm.p)
    counts = (bits > 0) & (bits < INFINITY)
    fits = counts & (term >= SMALLEST_TERM) & (term <= LARGEST_TERM)
    if not norm.is_scaled:
        vector[limbs.MISFITS] += (counts & ~fits).sum()
    term_bits = as_bits(torch.where(fits, term, 0.0))
    limbs.deposit(vector, significands(term_bits), units(term_bits))
