"""A Kulisch accumulator in torch integers, and the vector of sums that holds it.

Limb j is a signed 64-bit integer that weighs 2**(32 * j + BASE). Integer addition has no order,
so any split of the elements gives the same sum. Sources: U. Kulisch, "Computer Arithmetic and
Validity" (2008); R. Neal, "Fast exact summation using small and large superaccumulators",
arXiv:1505.05571 (2015).
"""

import torch

from gradclip.wrappers import is_wrapper

LIMBS = 136
BASE = -2176
NAN, POSITIVE_INFINITY, NEGATIVE_INFINITY, ZEROS, MISFITS, EXTREME = range(LIMBS, LIMBS + 6)
SUMS_LENGTH = 144

NO_EXTREME = -(1 << 63)
"""The extreme key when no element was seen: below every key."""

UNIT_LIMB = -BASE // 32
"""The limb whose bit 0 weighs 1."""

_BITS = 32
_MASK = (1 << _BITS) - 1


SMALLEST_POWER = 1 / 4096

UNIT_OF_COUNT = 116
"""The limb whose bit 0 counts elements for a tiny p, far above all magnitudes."""


def is_tiny(p: float) -> bool:
    """Whether p is so near 0 that the norm needs no powers: see the core's `norm.rs`."""
    return 0 < abs(p) < SMALLEST_POWER


def empty(like: torch.Tensor) -> torch.Tensor:
    """The sums of no elements: int64[144] on a tensor's device, a wrapper where it is one.

    Operations on a wrapper go to the tensors that it holds: each then has sums of its own.
    """
    if is_wrapper(like):
        vector = like.new_zeros(SUMS_LENGTH, dtype=torch.int64, layout=torch.strided)
    else:
        vector = torch.zeros(SUMS_LENGTH, dtype=torch.int64, device=like.device)
    vector[EXTREME] = NO_EXTREME
    return vector


def deposit(vector: torch.Tensor, whole: torch.Tensor, exponent: torch.Tensor) -> None:
    """Adds every `whole` * 2**`exponent` (int64 vectors; 0 <= whole < 2**54, exponent >= BASE).

    The pieces added to one limb are below 2**34 each, so 2**28 elements fit between two calls of
    `spread`.
    """
    place = exponent - BASE
    limb, shift = place >> 5, place & 31
    low = (whole & _MASK) << shift
    high = (whole >> _BITS) << shift
    limbs = vector[:LIMBS]
    limbs.scatter_add_(0, limb, low & _MASK)
    limbs.scatter_add_(0, limb + 1, (low >> _BITS) + (high & _MASK))
    limbs.scatter_add_(0, limb + 2, high >> _BITS)


def spread(vector: torch.Tensor) -> None:
    """Moves carries up one limb: each limb but the top one falls below 2**32 + 2**31."""
    limbs = vector[:LIMBS]
    carries = limbs[:-1] >> _BITS
    limbs[:-1] &= _MASK
    limbs[1:] += carries


def carry(vector: torch.Tensor) -> None:
    """Propagates all carries: each limb but the top one falls below 2**32.

    After two moves a limb is at most 2**32; a carry then runs through limbs that are all ones, so
    what enters limb j left the nearest limb below j that is not all ones.
    """
    spread(vector)
    spread(vector)
    limbs = vector[:LIMBS]
    place = torch.arange(LIMBS, device=limbs.device)
    stops = torch.where(limbs == _MASK, 0, place)
    leaves = (limbs >> _BITS)[torch.cummax(stops, 0).values]
    limbs[1:] += leaves[:-1]
    limbs[:-1] &= _MASK


def multiply(vector: torch.Tensor, weight: int) -> None:
    """Multiplies the sums by a count of copies, in 16-bit digits: no product leaves int64."""
    carry(vector)
    limbs = vector[:LIMBS]
    halves = torch.stack((limbs & 0xFFFF, limbs >> 16), dim=1).flatten()
    product = torch.zeros_like(halves)
    for place in range(4):
        digit = weight >> 16 * place & 0xFFFF
        product[place:] += halves[: halves.numel() - place] * digit
    limbs.copy_(product[0::2] + (product[1::2] << 16))
    vector[NAN:EXTREME] *= weight
    carry(vector)


def merge(vector: torch.Tensor, other: torch.Tensor) -> None:
    """Adds the sums of other elements."""
    extreme = torch.maximum(vector[EXTREME], other[EXTREME])
    vector += other
    vector[EXTREME] = extreme
    carry(vector)
