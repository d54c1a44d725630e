"""The digest of a tensor: 64 bits that depend on every bit of every element and on its position.

Definition, version 1. The bits of each element are cut into little-endian words of at most 32
bits: one word of 8 bits for float8, of 16 for float16 and bfloat16, of 32 for float32; two words
of 32 for float64 and complex64 and four for complex128, real part first; two words of 16 for
complex32. Word j of an element of n words has the number

    k = n * (offset + logical row-major index of the element) + j

whatever the strides. The digest is the sum of weight(k) * word(k) modulo 2**64, where

    weight(k) = 1 | rotate_left(mix((k >> 1) + 1), 27 if k is odd else 0)

and mix(i) is the finaliser of splitmix64 with shifts by 32, modulo 2**64:

    x = i * 0x9E3779B97F4A7C15
    x = (x ^ x >> 32) * 0xBF58476D1CE4E5B9
    x = (x ^ x >> 32) * 0x94D049BB133111EB
    x ^ x >> 32

The sum is linear in the words and has no order: any chunks, threads, devices and launch shapes give
the same integer, and the digests of shards add up modulo 2**64 where the `offset` of each is its
index in the whole. A tensor whose bits are all zero has the digest 0; the bits of -0.0 are not.

What the digest notices:

- A change of a single word, hence of a single bit or of an element of at most 32 bits: always.
  Weights are odd, and words differ by less than 2**32.
- Any other change, of the words k by the differences d(k): let 2**s be the largest power of two
  that divides all d(k). An odd number of d(k) / 2**s that are odd: always. An even number: the
  change is missed with a chance of 2**-(63 - s), if weights are taken as random odd integers: all
  but one of them leave one residue modulo 2**(64 - s) to the last one, of the 2**(63 - s) odd ones.

s is the lowest bit in which any word changes, so it is below the bits of a word: for 16-bit words
the chance is 2**-48 at most. For words of 32 bits it is 2**-63 where any lowest bit changes, 2**-40
where two small integers of float32 are swapped, and 2**-32, the worst, where all that changes are
signs. The digest finds mistakes; it does not withstand an adversary.

Sources: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators" (2014), and
D. Stafford's constants; D. Lemire, O. Kaser, "Strongly universal string hashing is fast" (2014).
"""

import torch
from torch._compile import _disable_dynamo

from .listed import listed_values
from .slices import slices

VERSION = 1
"""Changes with the definition: digests of two versions have nothing in common."""

_STEP = 0x9E3779B97F4A7C15 - 2**64
_FIRST_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
_SECOND_FACTOR = 0x94D049BB133111EB - 2**64
_ROTATION = 27

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Bytes of a real number -> the integers that hold its words."""


@_disable_dynamo
@torch.no_grad()
def digest(tensor: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """The digest of a tensor, as the int64 congruent to it: int64[1] on the tensor's device.

    tensor: strided or sparse COO, real or complex floating point (float8 included), any device; on
        `meta` the result is a meta tensor. Conjugate and negative views count by their values.
        An expanded dimension counts all its elements. A sparse tensor has the digest of its dense
        form, in whatever order it lists its values; values listed for one index are added first
        (see `listed`).
    offset: logical index of the first element, for a shard that is a range of a larger tensor.
    """
    total = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    if tensor.is_meta:
        return total
    if tensor.layout == torch.sparse_coo:
        for values, indices in listed_values(tensor):
            total += _digest(values, indices + offset)
        return total
    for piece in slices(tensor):
        indices = torch.arange(offset, offset + piece.numel(), device=tensor.device)
        total += _digest(piece, indices)
        offset += piece.numel()
    return total


def _digest(piece: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The digest of elements at logical indices (int64[n])."""
    words = _words(piece)
    places = indices.unsqueeze(1) * words.shape[1]
    places = places + torch.arange(words.shape[1], device=piece.device)
    return (weights(places) * words).sum()


def _words(piece: torch.Tensor) -> torch.Tensor:
    """The words of all elements, in logical order: int64[elements, words of an element]."""
    elements = piece.resolve_conj().resolve_neg().reshape(-1)
    numbers = torch.view_as_real(elements) if elements.is_complex() else elements.unsqueeze(1)
    dense = numbers.clone(memory_format=torch.contiguous_format)  # one element may keep any stride
    words = dense.view(_WORDS[numbers.element_size()])
    mask = (1 << 8 * words.element_size()) - 1
    return words.to(torch.int64) & mask


def weights(places: torch.Tensor) -> torch.Tensor:
    """The weights of words by their numbers (int64), as odd int64s of the same shape."""
    mixed = ((places >> 1) + 1) * _STEP
    for factor in (_FIRST_FACTOR, _SECOND_FACTOR):
        mixed = (mixed ^ _shifted(mixed, 32)) * factor
    mixed = mixed ^ _shifted(mixed, 32)
    rotated = mixed << _ROTATION | _shifted(mixed, 64 - _ROTATION)
    return torch.where(places & 1 == 0, mixed, rotated) | 1


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """A logical shift to the right, as that of int64 keeps the sign."""
    return bits >> by & ((1 << 64 - by) - 1)
