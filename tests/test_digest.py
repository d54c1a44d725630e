"""The digest of bits and positions, against its definition in plain integers."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradclip import _core, reference

MASK = 2**64 - 1
CODES = {
    torch.float32: ("I", 1),
    torch.bfloat16: ("H", 1),
    torch.float16: ("H", 1),
    torch.float64: ("I", 2),
    torch.complex64: ("I", 2),
    torch.complex128: ("I", 4),
    torch.float8_e4m3fn: ("B", 1),
    torch.int64: ("I", 2),
}


def weight(index: int) -> int:
    spread = (index + 1) * 0x9E3779B97F4A7C15 & MASK
    return ((spread ^ spread >> 32) * 0xBF58476D1CE4E5B9 & MASK) | 1


def words_of(tensor: torch.Tensor) -> list[int]:
    """The words of a tensor in row-major order, by Python's own reading of its bytes."""
    code, each = CODES[tensor.dtype]
    raw = bytes(tensor.contiguous().view(torch.uint8).reshape(-1).tolist())
    return list(struct.unpack(f"<{tensor.numel() * each}{code}", raw))


def defined(words: list[int], first: int = 0) -> int:
    return sum(weight(first + k) * word for k, word in enumerate(words)) % 2**64


def random_tensor(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    if dtype == torch.int64:
        return torch.randint(-(2**62), 2**62, shape, generator=made)
    if dtype.is_complex:
        parts = torch.randn(2, *shape, generator=made, dtype=torch.float64)
        return torch.complex(parts[0], parts[1]).to(dtype)
    return torch.randn(*shape, generator=made, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (5, 3), (2, 3, 4)])
def test_every_type_and_layout_has_the_digest_of_its_words(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = random_tensor(dtype, *shape)
    wanted = defined(words_of(tensor))
    layouts = [tensor, tensor.clone().flatten().view(shape)]
    if dtype not in (torch.float8_e4m3fn, torch.int64):
        wide = torch.zeros([2 * size + 1 for size in shape], dtype=dtype)
        view = wide[tuple(slice(1, 2 * size + 1, 2) for size in shape)]
        layouts += [view.copy_(tensor), tensor.mT.contiguous().mT if len(shape) > 1 else tensor]
    for layout in layouts:
        for threads in (1, 2):
            assert reference.digest(layout, threads) == wanted


def test_test_vectors_of_version_1() -> None:
    """These numbers are the standard: they never change."""
    assert [weight(k) for k in range(2)] == [defined([1]), defined([0, 1])]
    assert reference.digest(torch.tensor([1.0]), 1) == weight(0) * 0x3F800000 % 2**64
    vectors: list[tuple[torch.Tensor, int]] = [
        (torch.tensor([1.0, -2.0, 3.5]), VECTORS[0]),
        (torch.tensor([1.0, -2.0, 3.5], dtype=torch.float64), VECTORS[1]),
        (torch.tensor([1.0, -2.0, 3.5], dtype=torch.bfloat16), VECTORS[2]),
    ]
    for tensor, wanted in vectors:
        assert reference.digest(tensor, 1) == wanted == defined(words_of(tensor))


VECTORS = (2260237076142227456, 9792381325305708544, 6319710665588424608)


def test_large_tensors_by_threads_and_by_operations() -> None:
    module: Any = __import__("gradclip.reference.digest", fromlist=["digest"])
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        tensor = random_tensor(dtype, 300_001)
        one, two = reference.digest(tensor, 1), reference.digest(tensor, 2)
        by_operations = module._by_operations(module._words(tensor), 0)
        assert one == two == int(by_operations) % 2**64
        strided = random_tensor(dtype, 300_001 * 2)[::2]
        assert reference.digest(strided, 2) == reference.digest(strided.clone(), 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), st.data())
def test_parts_add_up_and_changes_are_noticed(words: list[int], data: st.DataObject) -> None:
    tensor = torch.tensor([w - 2**32 if w >= 2**31 else w for w in words], dtype=torch.int32)
    whole = reference.digest(tensor, 1)
    assert whole == defined(words)
    cut = data.draw(st.integers(0, len(words)))
    tail = tensor[cut:].clone()
    rest = _core.digest(tail.data_ptr(), tail.numel(), 4, cut, 1) if tail.numel() else 0
    assert (reference.digest(tensor[:cut].clone(), 1) + rest) % 2**64 == whole
    index, bit = data.draw(st.integers(0, len(words) - 1)), data.draw(st.integers(0, 31))
    flipped = list(words)
    flipped[index] ^= 1 << bit
    assert defined(flipped) != whole
    other = data.draw(st.integers(0, len(words) - 1))
    swapped = list(words)
    swapped[index], swapped[other] = swapped[other], swapped[index]
    assert (defined(swapped) == whole) == (swapped == words)


def test_swapped_elements_rows_and_signs_are_noticed() -> None:
    tensor = random_tensor(torch.float32, 64, 8)
    digest = reference.digest(tensor, 1)
    for k in range(63):
        rows = tensor.clone()
        rows[[k, k + 1]] = rows[[k + 1, k]]
        assert reference.digest(rows, 1) != digest
        signs = tensor.clone()
        signs[k] *= -1
        assert reference.digest(signs, 1) != digest
        pair = tensor.clone().view(-1)
        pair[k], pair[k + 100] = -pair[k], -pair[k + 100]
        assert reference.digest(pair.view(64, 8), 1) != digest


def test_weights_do_not_cancel_in_neighbours() -> None:
    """Two flipped signs of float32 cancel if the sum of their weights vanishes modulo 2^33."""
    weights = [weight(k) for k in range(4096)]
    for distance in range(1, 65):
        sums = {(a + b) % 2**33 for a, b in zip(weights, weights[distance:], strict=False)}
        differences = {(a - b) % 2**40 for a, b in zip(weights, weights[distance:], strict=False)}
        assert 0 not in sums
        assert 0 not in differences
        assert len(differences) > 4000


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_zeros_sparse_and_bad_memory() -> None:
    assert reference.digest(torch.zeros(5), 1) == 0
    assert reference.digest(torch.tensor([0.0, -0.0]), 1) != 0
    indices = torch.tensor([[2, 0]])
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    one = torch.sparse_coo_tensor(indices, rows, (3, 2), check_invariants=True)
    other = torch.sparse_coo_tensor(indices.flip(1), torch.tensor([[3.0, 4.0], [1.0, 2.0]]), (3, 2))
    assert reference.digest(one, 1) == reference.digest(other, 1) != 0
    with pytest.raises(ValueError, match="`address` is 3"):
        _core.digest(3, 1, 4, 0, 1)
    with pytest.raises(ValueError, match="`bytes` is 3"):
        _core.digest(9, 1, 3, 0, 1)
