"""The digest of bits and positions by its definition, in Python's integers."""

import torch

_MODULUS = 2**64


def weight(k: int) -> int:
    """The weight of word k."""
    x = ((k >> 1) + 1) * 0x9E3779B97F4A7C15 % _MODULUS
    x = (x ^ x >> 32) * 0xBF58476D1CE4E5B9 % _MODULUS
    x = (x ^ x >> 32) * 0x94D049BB133111EB % _MODULUS
    x ^= x >> 32
    if k % 2 == 1:
        x = (x << 27 | x >> 37) % _MODULUS
    return x | 1


def of_bytes(content: bytes, width: int, first: int = 0) -> int:
    """The digest of little-endian words of `width` bytes, the first of which has a number."""
    starts = range(0, len(content), width)
    words = [int.from_bytes(content[start : start + width], "little") for start in starts]
    return sum(weight(k % _MODULUS) * word for k, word in enumerate(words, first)) % _MODULUS


def digest(tensor: torch.Tensor, offset: int = 0) -> int:
    """The digest of a dense tensor that begins at a logical index of a larger one."""
    values = tensor.detach().cpu().resolve_conj().resolve_neg().clone().contiguous()
    content = bytes(values.reshape(-1).unsqueeze(1).view(torch.uint8).flatten().tolist())
    number = values.element_size() // (2 if values.is_complex() else 1)
    width = min(number, 4)
    return of_bytes(content, width, offset * values.element_size() // width)
