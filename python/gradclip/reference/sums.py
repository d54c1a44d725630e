"""The sums of one gradient: the vector of integers that engines, kernels and ranks exchange."""

import math
from collections.abc import Iterator

import torch
from torch._compile import _disable_dynamo

from . import limbs, terms
from .magnitudes import INFINITY, magnitude_bits, modulus_bits
from .slices import flat_range, slices, unexpanded
from .sparse import blocks, owned_values


@_disable_dynamo
@torch.no_grad()
def sums(
    tensor: torch.Tensor,
    norm_type: float,
    *,
    scale_exponent: int = 0,
    divisor: float | None = None,
    owned: tuple[int, int] | None = None,
) -> torch.Tensor:
    """The sums over a gradient's elements for one norm type: int64[144] on the gradient's device.

    [0:136] limbs of the exact sum of the terms, carries propagated; [136] NaN, [137] +Inf and
    [138] -Inf elements; [139] zeros (p < 0); [140] terms out of range (p not 0, 1, 2, inf, -inf),
    which ask for another pass with a scale; [141] the key of the largest (p = inf) or smallest (p
    = -inf) magnitude; the rest is zero.

    tensor: strided or sparse COO, real or complex floating point (float8 and complex32 included),
        any device; on `meta` the result is a meta tensor, and of a wrapper subclass a wrapper.
        Complex elements count as two reals for p = 2, as |z| otherwise. What a sparse tensor lists
        more than once for an index counts as its exact sum, rounded to float64.
    norm_type: p. Nearer to 0 than 1/4096 the limbs hold the sum of the magnitudes, and from limb
        116 up how many are not zero.
    scale_exponent: terms are those of |x| * 2**-scale_exponent (p not 0, 1, 2, inf, -inf).
    divisor: terms are those of |x| / divisor, instead.
    owned: only the row-major elements [start, stop).
    """
    norm = terms.Norm(norm_type, scale_exponent, divisor)
    vector = limbs.empty(tensor)
    if tensor.is_meta:
        return vector
    if tensor.layout == torch.sparse_coo:
        _add_sparse(vector, tensor, norm, owned)
    elif owned is None:
        _add_strided(vector, tensor, norm)
    else:
        for view in flat_range(tensor, *owned):
            _add_strided(vector, view, norm)
    return vector


def _add_strided(vector: torch.Tensor, tensor: torch.Tensor, norm: terms.Norm) -> None:
    elements, weight = unexpanded(tensor)
    if weight == 1:
        _add_elements(vector, elements, norm)
    elif elements.numel():
        once = limbs.empty(tensor)
        _add_elements(once, elements, norm)
        limbs.multiply(once, weight)
        limbs.merge(vector, once)


def _add_elements(vector: torch.Tensor, tensor: torch.Tensor, norm: terms.Norm) -> None:
    elements = tensor.conj() if tensor.is_conj() else tensor
    if elements.is_complex() and norm.p == 2:
        elements = torch.view_as_real(elements)
    add = _add_moduli if elements.is_complex() else _add_reals
    for piece in slices(elements):
        add(vector, piece.resolve_neg(), norm)
    limbs.carry(vector)


def _add_reals(vector: torch.Tensor, piece: torch.Tensor, norm: terms.Norm) -> None:
    wide = piece if piece.dtype == torch.float64 else piece.to(torch.float32)
    vector[limbs.POSITIVE_INFINITY] += (wide == math.inf).sum()
    vector[limbs.NEGATIVE_INFINITY] += (wide == -math.inf).sum()
    terms.add(vector, magnitude_bits(wide), norm, is_narrow=wide.dtype == torch.float32)


def _add_moduli(vector: torch.Tensor, piece: torch.Tensor, norm: terms.Norm) -> None:
    bits = modulus_bits(piece if piece.dtype != torch.complex32 else piece.to(torch.complex64))
    vector[limbs.POSITIVE_INFINITY] += (bits == INFINITY).sum()
    terms.add(vector, bits, norm, is_narrow=False)


def _add_sparse(
    vector: torch.Tensor, tensor: torch.Tensor, norm: terms.Norm, owned: tuple[int, int] | None
) -> None:
    listed = 0
    for values in _sparse_values(tensor, owned):
        _add_elements(vector, values, norm)
        listed += values.numel()
    start, stop = owned or (0, tensor.numel())
    unlisted = stop - start - listed
    if unlisted and (norm.p < 0 or norm.p == math.inf):
        zeros = limbs.empty(tensor)
        _add_elements(zeros, tensor.new_zeros(1, layout=torch.strided), norm)
        limbs.multiply(zeros, unlisted)
        limbs.merge(vector, zeros)


def _sparse_values(tensor: torch.Tensor, owned: tuple[int, int] | None) -> Iterator[torch.Tensor]:
    if owned is not None:
        yield from owned_values(tensor, *owned)
        return
    for block in blocks(tensor):
        yield block.values
