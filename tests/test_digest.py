"""Digests of bits and positions: equal on all routes, and changed by what they must notice."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gradclip import engine, gradients, reference
from gradclip.parameters import Parameters
from gradclip.reference import listed, slices
from gradclip.reference.digest import VERSION, weights
from tests import digest_oracle
from tests.gradients import FLOAT8_DTYPES, REAL_DTYPES, random_values

COMPLEX_DTYPES = [torch.complex64, torch.complex128]
DTYPES = [*REAL_DTYPES, *COMPLEX_DTYPES, torch.complex32, *FLOAT8_DTYPES]
ENGINE_DTYPES = [*REAL_DTYPES, *COMPLEX_DTYPES]
VECTORS = json.loads((Path(__file__).parent / "data" / "digests.json").read_text())

Change = Callable[[torch.Tensor], torch.Tensor]

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def bits(size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Elements of any bits, NaN among them."""
    random = torch.Generator().manual_seed(seed)
    item = torch.empty(0, dtype=dtype).element_size()
    whole = torch.randint(0, 256, (size * item,), dtype=torch.uint8, generator=random)
    return whole.view(dtype)


def engine_digests(tensors: list[torch.Tensor], threads: int = 1) -> list[int]:
    torch.set_num_threads(threads)
    return engine.digests(gradients.given(Parameters.of(tensors, None)))


def reference_digest(tensor: torch.Tensor, offset: int = 0) -> int:
    found = reference.digest(tensor, offset)
    assert (found.shape, found.dtype) == ((1,), torch.int64)
    return int(found) % 2**64


def check(tensor: torch.Tensor) -> None:
    """Both implementations give what the definition says."""
    expected = digest_oracle.digest(tensor)
    assert reference_digest(tensor) == expected
    if tensor.dtype != torch.complex32:  # refused elsewhere
        assert engine_digests([tensor]) == [expected]


class TestDefinition:
    @pytest.mark.parametrize("vector", VECTORS["vectors"], ids=lambda vector: vector["name"])
    def test_vectors(self, vector: dict[str, Any]) -> None:
        """Version 1 for good: these numbers were computed once, in Python's integers."""
        content = bytes.fromhex(vector["bytes"])
        tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        tensor = tensor.view(getattr(torch, vector["dtype"])).reshape(vector["shape"])
        assert digest_oracle.digest(tensor, vector["offset"]) == vector["digest"]
        assert reference_digest(tensor, vector["offset"]) == vector["digest"]
        if vector["offset"] == 0:
            assert engine_digests([tensor]) == [vector["digest"]]

    def test_version(self) -> None:
        assert VECTORS["version"] == VERSION == 1

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("size", [0, 1, 2, 3, 31, 32, 33, 65, 1000])
    def test_any_bits(self, dtype: torch.dtype, size: int) -> None:
        check(bits(size, dtype, size))

    @pytest.mark.parametrize("dtype", ENGINE_DTYPES)
    def test_addresses_that_are_aligned_to_the_element_alone(self, dtype: torch.dtype) -> None:
        whole = bits(500, dtype)
        for start in range(1, 9):
            check(whole[start : 500 - start])

    def test_scalars(self) -> None:
        for dtype in ENGINE_DTYPES:
            check(bits(1, dtype).reshape(()))

    def test_zero_bits_give_zero_and_negative_zeros_do_not(self) -> None:
        for dtype in ENGINE_DTYPES:
            zeros = torch.zeros(77, dtype=dtype)
            assert engine_digests([zeros]) == [reference_digest(zeros)] == [0]
            assert engine_digests([-zeros]) == [reference_digest(-zeros)] != [0]

    def test_slices_of_the_reference_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tensor = bits(5 * 7 * 11, torch.float64).reshape(5, 7, 11).transpose(0, 2)
        expected = digest_oracle.digest(tensor)
        for limit in (1, 3, 10, 40, 100):
            monkeypatch.setattr(slices, "SLICE_ELEMENTS", limit)
            assert reference_digest(tensor) == expected

    @pytest.mark.parametrize("dtype", ENGINE_DTYPES)
    @pytest.mark.parametrize("threads", [1, 2, 3])
    def test_tensors_that_threads_share(self, dtype: torch.dtype, threads: int) -> None:
        tensors = [
            bits(200_003, dtype),
            bits(300 * 500, dtype).reshape(300, 500).t(),
            bits(300 * 500, dtype).reshape(300, 500)[:, 3:409],
            bits(70_000, dtype)[::3],
            bits(1, dtype),
        ]
        expected = [reference_digest(tensor) for tensor in tensors]
        assert engine_digests(tensors, threads) == expected


@st.composite
def strided(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any bits with permuted, cut, stepped and expanded dimensions."""
    dtype = draw(st.sampled_from(ENGINE_DTYPES))
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    tensor = bits(math.prod(shape), dtype, draw(st.integers(0, 99))).reshape(shape)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    for dim, size in enumerate(tensor.shape):
        start, step = draw(st.integers(0, size - 1)), draw(st.integers(1, 3))
        tensor = tensor[(slice(None),) * dim + (slice(start, None, step),)]
    if draw(st.booleans()):
        place = draw(st.integers(0, tensor.dim()))
        sizes = list(tensor.shape)
        sizes.insert(place, draw(st.integers(1, 4)))
        tensor = tensor.unsqueeze(place).expand(sizes)
    return tensor


class TestRoutes:
    @hypothesis.given(strided())
    def test_any_strides(self, tensor: torch.Tensor) -> None:
        check(tensor)

    @hypothesis.given(st.lists(strided(), max_size=5))
    def test_lists(self, tensors: list[torch.Tensor]) -> None:
        expected = [digest_oracle.digest(tensor) for tensor in tensors]
        assert engine_digests(tensors) == expected

    def test_both_routes(self, route: str) -> None:
        tensors = [bits(99, dtype).reshape(9, 11).t() for dtype in ENGINE_DTYPES]
        assert engine_digests(tensors) == [digest_oracle.digest(tensor) for tensor in tensors]

    @pytest.mark.parametrize("dtype", COMPLEX_DTYPES)
    def test_conjugate_and_negative_views_count_by_their_values(self, dtype: torch.dtype) -> None:
        values = random_values((5, 6), dtype)
        for view in (values.conj(), values.conj().imag, values.conj().t()):
            assert view.is_conj() or view.is_neg()
            assert engine_digests([view]) == [reference_digest(view)]
            assert engine_digests([view]) == engine_digests([view.resolve_conj().resolve_neg()])
        assert engine_digests([values.conj()]) != engine_digests([values.clone()])

    def test_owned_ranges_do_not_count(self) -> None:
        tensor = random_values(50, torch.float32)
        given = gradients.given(Parameters.of([tensor], None), [(3, 9)])
        assert engine.digests(given) == [digest_oracle.digest(tensor)]

    def test_tensors_without_values(self) -> None:
        meta = torch.ones(5, device="meta")
        assert engine_digests([meta]) == [0]
        assert reference.digest(meta).is_meta
        with FakeTensorMode():
            assert engine_digests([torch.ones(5)]) == [0]

    def test_subnormals_and_nan_payloads_survive(self) -> None:
        payloads = torch.tensor([1, 0x7F800001, 0x7FC00001, -1, -(2**31) + 1], dtype=torch.int32)
        tensor = payloads.view(torch.float32).reshape(5, 1).expand(5, 2)
        assert torch.set_flush_denormal(True)
        try:
            check(tensor)
            check(tensor.t())
        finally:
            torch.set_flush_denormal(False)


class TestShards:
    @hypothesis.given(
        st.sampled_from(DTYPES), st.integers(0, 60), st.lists(st.integers(0, 60), max_size=4)
    )
    def test_digests_at_offsets_add_up(
        self, dtype: torch.dtype, size: int, cuts: list[int]
    ) -> None:
        whole = bits(size, dtype)
        ends = sorted([0, size, *(min(cut, size) for cut in cuts)])
        pairs = itertools.pairwise(ends)
        parts = [reference_digest(whole[start:stop], start) for start, stop in pairs]
        assert sum(parts) % 2**64 == reference_digest(whole)

    def test_far_offsets(self) -> None:
        tensor = bits(20, torch.float64)
        for offset in (2**31 - 3, 2**32 - 5, 2**40):
            assert reference_digest(tensor, offset) == digest_oracle.digest(tensor, offset)


def swapped_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Its first and last different elements in each other's place."""
    flat = tensor.clone().reshape(-1)
    flat[[0, -1]] = flat[[-1, 0]].clone()
    return flat.reshape(tensor.shape)


CHANGES: dict[str, Change] = {
    "one sign": lambda t: torch.cat((-t.reshape(-1)[:1], t.reshape(-1)[1:])).reshape(t.shape),
    "all signs": lambda t: -t,
    "two elements": swapped_elements,
    "two rows": lambda t: t[[1, 0, *range(2, len(t))]],
    "two columns": lambda t: t[:, [1, 0, *range(2, t.shape[1])]],
    "reversed": lambda t: t.flip(0, 1),
    "rolled": lambda t: t.roll(1),
    "transposed memory": lambda t: t.t().reshape(t.shape),
    "half doubled": lambda t: torch.cat((t[:1] * 2, t[1:])),
}


class TestNotices:
    @hypothesis.given(
        st.sampled_from(ENGINE_DTYPES), st.integers(1, 40), st.integers(0, 2**20), st.booleans()
    )
    def test_every_flipped_bit(
        self, dtype: torch.dtype, size: int, where: int, zeros: bool
    ) -> None:
        tensor = torch.zeros(size, dtype=dtype) if zeros else bits(size, dtype)
        changed = tensor.clone()
        changed.view(torch.uint8)[where // 8 % changed.nbytes] ^= 1 << where % 8
        assert engine_digests([changed]) != engine_digests([tensor])
        assert reference_digest(changed) != reference_digest(tensor)

    def test_each_single_bit(self) -> None:
        """All of them, in a small tensor of each type."""
        for dtype in DTYPES:
            tensor = bits(5, dtype)
            seen = {reference_digest(tensor)}
            for byte in range(tensor.nbytes):
                for bit in range(8):
                    changed = tensor.clone()
                    changed.view(torch.uint8)[byte] ^= 1 << bit
                    seen.add(reference_digest(changed))
            assert len(seen) == 8 * tensor.nbytes + 1

    @pytest.mark.parametrize("dtype", ENGINE_DTYPES)
    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
    def test_changes_that_no_norm_shows(self, change: Change, dtype: torch.dtype) -> None:
        for values in (random_values((6, 8), dtype), torch.arange(1, 49).reshape(6, 8).to(dtype)):
            assert engine_digests([change(values)]) != engine_digests([values.clone()])

    @hypothesis.given(
        st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
        st.lists(st.integers(0, 999), min_size=2, max_size=8, unique=True),
        st.integers(0, 2**16),
    )
    def test_several_signs(self, dtype: torch.dtype, where: list[int], seed: int) -> None:
        tensor = random_values(1000, dtype, seed=seed)
        changed = tensor.clone()
        changed[where] = -changed[where]
        assert engine_digests([changed]) != engine_digests([tensor])

    @pytest.mark.parametrize("shape", [(12,), (1, 12), (3, 4), (4, 3)])
    def test_shapes_are_not_digested(self, shape: tuple[int, ...]) -> None:
        tensor = bits(12, torch.float32)
        assert engine_digests([tensor.reshape(shape)]) == engine_digests([tensor])


class TestWeights:
    """What the chance of a miss takes for granted: weights look like random odd integers."""

    SAMPLES = 1 << 18

    def _weights(self, start: int = 0) -> torch.Tensor:
        return weights(torch.arange(start, start + self.SAMPLES))

    def _is_even(self, values: torch.Tensor, shift: int) -> None:
        """16 of the bits from `shift` on take all values alike, by a chi-squared test."""
        counts = torch.bincount(values >> shift & 0xFFFF, minlength=1 << 16).double()
        expected = len(values) / (1 << 16)
        deviation = ((counts - expected) ** 2 / expected).sum().item() - 65535
        assert abs(deviation) < 6 * math.sqrt(2 * 65535)

    def test_they_are_those_of_the_definition(self) -> None:
        places = [0, 1, 2, 3, 77, 2**32 - 1, 2**32, 2**33 + 1, 2**62 + 5]
        found = weights(torch.tensor(places))
        assert [int(w) % 2**64 for w in found] == [digest_oracle.weight(k) for k in places]

    def test_they_are_odd_and_differ(self) -> None:
        found = self._weights()
        assert (found & 1 == 1).all()
        assert found.unique().numel() == found.numel()

    @pytest.mark.parametrize("distance", [1, 2, 3, 4, 8, 64, 100, 256, 1000, 1024, 65536, 2**20])
    @pytest.mark.parametrize("shift", [1, 9, 17, 25, 33, 41, 48])
    def test_neighbours_have_no_relation(self, distance: int, shift: int) -> None:
        """Were it not so, flipped signs or swapped elements would cancel too often."""
        first, second = self._weights(), self._weights(distance)
        for factor in (1, -1, 3, 1 << 16, -255):
            self._is_even(first + factor * second, shift)
        self._is_even((first - second)[::2], shift)
        self._is_even((first + second)[1::2], shift)

    def test_flipped_bits_of_the_number_flip_half_of_the_weight(self) -> None:
        places = torch.arange(1 << 12) * 0x9E3779B1
        for bit in range(40):
            flipped = weights(places) ^ weights(places ^ (1 << bit))
            share = torch.stack([flipped >> at & 1 for at in range(1, 64)]).double().mean(dim=1)
            assert (share - 0.5).abs().max() < 6 * 0.5 / math.sqrt(1 << 12)


class TestSparse:
    def listed(self, indices: list[list[int]], values: torch.Tensor, *shape: int) -> torch.Tensor:
        return torch.sparse_coo_tensor(torch.tensor(indices), values, shape, check_invariants=True)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128])
    def test_the_dense_form_has_the_same_digest(self, dtype: torch.dtype) -> None:
        for sparse_dim in (1, 2, 3):
            dense = random_values((4, 3, 5), dtype)
            dense[torch.rand(dense.shape) < 0.5] = 0
            dense[2] = 0
            sparse = dense.to_sparse(sparse_dim)
            assert engine_digests([sparse]) == [digest_oracle.digest(dense)]
            assert reference_digest(sparse, 7) == digest_oracle.digest(dense, 7)

    def test_listing_order_does_not_matter(self) -> None:
        values = random_values((3, 4), torch.float32)
        forward = self.listed([[5, 0, 9]], values, 10, 4)
        backward = self.listed([[9, 0, 5]], values.flip(0), 10, 4)
        assert engine_digests([forward]) == engine_digests([backward])
        assert engine_digests([forward]) == [digest_oracle.digest(forward.to_dense())]
        other = self.listed([[5, 0, 8]], values, 10, 4)
        assert engine_digests([other]) != engine_digests([forward])

    @hypothesis.given(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99)), max_size=12),
        st.randoms(use_true_random=False),
        st.sampled_from([torch.float16, torch.float32, torch.float64, torch.complex64]),
        st.integers(1, 20),
    )
    def test_repeats_add_up_in_any_order(
        self, entries: list[tuple[int, int]], random: Any, dtype: torch.dtype, limit: int
    ) -> None:
        def listing(entries: list[tuple[int, int]]) -> torch.Tensor:
            rows = [random_values(3, dtype, spread=12, seed=seed) for _, seed in entries]
            values = torch.stack(rows) if rows else torch.empty(0, 3, dtype=dtype)
            return self.listed([[index for index, _ in entries]], values, 4, 3)

        before = listing(entries)
        random.shuffle(entries)
        after = listing(entries)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(listed, "SLICE_ELEMENTS", limit)
            assert reference_digest(after) == reference_digest(before)

    def test_repeats_are_rounded_once_they_are_added(self) -> None:
        tiny = torch.tensor([[1.0], [2.0**-24], [2.0**-24]])
        for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
            sparse = self.listed([[1, 1, 1]], tiny[order], 3, 1)
            dense = torch.tensor([[0.0], [1 + 2.0**-23], [0.0]])
            assert engine_digests([sparse]) == [digest_oracle.digest(dense)]

    def test_different_sums_differ(self) -> None:
        """Bits of 1 and 4 add up to those of 2 and 2: digests of the values alone would not do."""
        values = torch.tensor([1.0, 4.0]), torch.tensor([2.0, 2.0])
        first, second = (self.listed([[0, 0]], each, 2) for each in values)
        assert engine_digests([first]) != engine_digests([second])

    def test_nothing_listed(self) -> None:
        empty = self.listed([[]], torch.empty(0, 4), 3, 4)
        assert engine_digests([empty]) == [reference_digest(empty.coalesce())] == [0]
        narrow = self.listed([[0, 0]], torch.empty(2, 0), 3, 0)
        assert engine_digests([narrow]) == [0]
