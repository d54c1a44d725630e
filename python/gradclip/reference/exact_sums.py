"""Many sums at once, each exact and rounded once to float64: the values that a row repeats.

As in `limbs`, but one accumulator for each sum, of just the limbs that the values reach.
"""

import torch

from .magnitudes import INFINITY, as_bits, scale_by_power, significands, units
from .slices import SLICE_ELEMENTS

_BITS = 32
_MASK = (1 << _BITS) - 1
_KEPT = 55
"""Bits that decide the rounding: a float64's 53, one more, and whether anything is left below."""


def sums_by_row(values: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    """The exact sums of the values of each row, rounded to float64, ties to even.

    Waits for the device.

    values: float64[n, columns].
    rows: int64[n], the row in [0, count) that each entry belongs to; each row has one or more.
    Returns float64[count, columns]. A NaN, or infinities of both signs, give NaN.
    """
    result = values.new_zeros((count, values.shape[1]))
    listed = torch.zeros(count, dtype=torch.int64, device=rows.device)
    listed.scatter_add_(0, rows, torch.ones_like(rows))
    is_repeated = listed[rows] > 1
    result[rows[~is_repeated]] = values[~is_repeated]
    if bool(is_repeated.any()):
        targets, groups = torch.unique(rows[is_repeated], return_inverse=True)
        result[targets] = _repeated(values[is_repeated], groups, len(targets))
    return result


def _repeated(values: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    bits = as_bits(values) & ((1 << 63) - 1)
    is_finite = bits < INFINITY
    whole = torch.where(is_finite, significands(bits), 0)
    whole = torch.where(values < 0, -whole, whole)
    unit = units(bits)
    exponents = unit[is_finite & (bits > 0)]
    sums = values.new_zeros((count, values.shape[1]))
    if exponents.numel():
        low, high = int(exponents.min()), int(exponents.max()) + 53
        base = low - 2 * _BITS  # two limbs of zeros below, for the rounding
        limbs = -(-(high - base + rows.numel().bit_length()) // _BITS) + 2
        width = max(1, SLICE_ELEMENTS // (count * limbs))
        for start in range(0, values.shape[1], width):
            part = slice(start, start + width)
            place = torch.where(whole[:, part] != 0, unit[:, part] - base, 0)
            sums[:, part] = _rounded(_added(whole[:, part], place, rows, count, limbs), base)
    return _with_others(sums, values, is_finite, rows)


def _added(
    whole: torch.Tensor, place: torch.Tensor, rows: torch.Tensor, count: int, limbs: int
) -> torch.Tensor:
    """The limbs of each sum of `whole` * 2**`place`, carries pending: int64[count, columns, limbs].

    Pieces are below 2**33, so 2**30 entries fit.
    """
    columns = whole.shape[1]
    sums = torch.zeros(count * columns * limbs, dtype=torch.int64, device=whole.device)
    sign, magnitude = whole.sign(), whole.abs()
    shift = place & (_BITS - 1)
    low = (magnitude & _MASK) << shift
    high = (magnitude >> _BITS) << shift
    column = torch.arange(columns, device=whole.device)
    target = (rows.unsqueeze(1) * columns + column) * limbs + (place >> 5)
    pieces = (low & _MASK, (low >> _BITS) + (high & _MASK), high >> _BITS)
    for step, piece in enumerate(pieces):
        sums.scatter_add_(0, (target + step).flatten(), (sign * piece).flatten())
    return sums.reshape(count, columns, limbs)


def _rounded(sums: torch.Tensor, base: int) -> torch.Tensor:
    """The float64 nearest to each sum; limb j weighs 2**(32 * j + base), the lowest two are 0."""
    _carry(sums)
    is_negative = sums[..., -1] < 0
    sums = torch.where(is_negative.unsqueeze(-1), -sums, sums)
    _carry(sums)
    place = torch.arange(sums.shape[-1], device=sums.device)
    is_set = sums != 0
    top = torch.where(is_set, place, 2).amax(-1).clamp_(min=2)
    lowest = torch.where(is_set, place, sums.shape[-1]).amin(-1)
    first, second, third = (
        sums.gather(-1, (top - step).unsqueeze(-1)).squeeze(-1) for step in range(3)
    )
    length = (as_bits(first.to(torch.float64)) >> 52) - 1022  # of the top limb, in bits
    drop = length.clamp(min=1) + 2 * _BITS - _KEPT
    few = drop.clamp(max=_BITS)
    upper = (second << (_BITS - few)) | (third >> few)
    upper = torch.where(drop > _BITS, second >> (drop - few), upper)
    kept = (first << (2 * _BITS - drop)) | upper
    cut = torch.where(
        drop > _BITS, third | (second & ((1 << (drop - few)) - 1)), third & ((1 << few) - 1)
    )
    is_inexact = (cut != 0) | (lowest < top - 2)
    nearest = (kept | is_inexact.to(torch.int64)).to(torch.float64)
    value = scale_by_power(nearest, _BITS * (top - 2) + drop + base)
    return torch.where(is_negative, -value, value)


def _carry(sums: torch.Tensor) -> None:
    """Propagates carries: each limb but the top one comes into [0, 2**32)."""
    for limb in range(sums.shape[-1] - 1):
        sums[..., limb + 1] += sums[..., limb] >> _BITS
        sums[..., limb] &= _MASK


def _with_others(
    sums: torch.Tensor, values: torch.Tensor, is_finite: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """The sums where all values are finite; elsewhere what IEEE arithmetic gives."""
    if bool(is_finite.all()):
        return sums
    others = torch.zeros_like(sums)
    others.index_add_(0, rows, torch.where(is_finite, 0.0, values))
    return torch.where(others == 0, sums, others)
