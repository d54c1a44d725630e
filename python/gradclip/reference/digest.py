"""A digest of bits and positions: the definition, and its form in torch operations.

Version 1. The elements of a tensor, in row-major order, are cut into words of 8, 16 or 32 bits: the
element itself for types up to 32 bits, else its 32-bit parts from the lowest address on, as numbers
on a little-endian machine. Word k has the weight

    s = (k + 1) * 0x9E3779B97F4A7C15;  weight(k) = (s ^ (s >> 32)) * 0xBF58476D1CE4E5B9 | 1

modulo 2^64, and the digest is the sum of weight(k) * word(k) modulo 2^64. It depends on nothing but
the elements: not on strides, device, threads or order. Parts of a tensor whose words keep their
numbers add up to its digest.

What it notices: a change of one word always, as weights are odd. A change of several words goes
unnoticed only if the weighted differences cancel. For differences with v trailing zero bits that
takes weights that agree in 64 - v bits: chance 2^-(63 - v) for weights that behave as random ones,
so 2^-32 or less for words of 32 bits (two flipped signs of float32) and 2^-48 for 16 bits. It is no
cryptographic digest: who chooses the words can find two tensors with the same one.

Bits are compared, not values: -0.0 differs from 0.0, and NaN from another NaN. All zero bits give 0.
"""

from __future__ import annotations

import torch

from gradclip import _core

from .slices import SLICE_ELEMENTS, slices

_MASK = 2**32 - 1
_STEP = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@torch.no_grad()
def digest(tensor: torch.Tensor, threads: int) -> int:
    """The digest of a tensor: 0 <= digest < 2^64.

    Args:
        tensor: strided or sparse COO, of any dtype, on any device. A sparse tensor has the digest of
            its coalesced indices plus that of its values.
        threads: threads to use on the CPU.
    """
    if tensor.layout == torch.sparse_coo:
        with torch.sparse.check_sparse_tensor_invariants(enable=False):
            coalesced = tensor.detach().coalesce()
        indices, values = coalesced.indices(), coalesced.values()
        return (digest(indices, threads) + digest(values, threads)) % 2**64
    if tensor.is_meta:
        return 0
    total, first = 0, 0
    for piece in (tensor.detach(),) if tensor.is_contiguous() else slices(tensor.detach()):
        words = _words(piece)
        if words.device.type == "cpu":
            total += _core.digest(
                words.data_ptr(), words.numel(), words.element_size(), first, threads
            )
        else:
            total += int(_by_operations(words, first))
        first += words.numel()
    return total % 2**64


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's words in row-major order; a view where it is contiguous."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    if flat.numel() < 2:  # may keep any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(_WORDS[min(flat.element_size(), 4)])


def _by_operations(words: torch.Tensor, first: int) -> torch.Tensor:
    """The digest of flat words as int64, 0-dim, on their device; `first` numbers the first."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    mask = (1 << 8 * words.element_size()) - 1
    for start in range(0, words.numel(), SLICE_ELEMENTS):
        piece = words[start : start + SLICE_ELEMENTS].to(torch.int64) & mask
        total += (piece * weights(first + start, piece.numel(), words.device)).sum()
    return total


def weights(start: int, count: int, device: torch.device) -> torch.Tensor:
    """The weights of words [start, start + count), modulo 2^64: int64[count]."""
    spread = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device) * _STEP
    return ((spread ^ ((spread >> 32) & _MASK)) * _MIX) | 1
