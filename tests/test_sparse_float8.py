"""Sparse and 8-bit gradients: torch operations take them, beside others in one list."""

import itertools
import math
from random import Random

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import gradclip
from gradclip import _core, reference
from tests import oracle
from tests.gradients import (
    EXACT_NORMS,
    FLOAT8_DTYPES,
    REAL_DTYPES,
    gradient_of,
    parameter,
    parameters,
    random_values,
    total,
)

SHAPE = (6, 5, 3)


def sparse(dtype: torch.dtype = torch.float32, *, is_coalesced: bool = False) -> torch.Tensor:
    """Indices out of order, one listed twice, one value zero; a dense dimension of 3."""
    indices = torch.tensor([[4, 0, 4, 2, 1], [1, 3, 1, 0, 4]])
    values = random_values((5, 3), dtype, seed=7)
    values[3, 1] = 0
    listed = torch.sparse_coo_tensor(indices, values, SHAPE, check_invariants=True)
    return listed.coalesce() if is_coalesced else listed


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]


@pytest.mark.parametrize("p", [*EXACT_NORMS, 3.0, -1.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_coalesced", [True, False])
def test_norms_are_those_of_the_dense_form(
    p: float, dtype: torch.dtype, is_coalesced: bool
) -> None:
    gradient = sparse(dtype, is_coalesced=is_coalesced)
    dense = oracle.dense(gradient)
    assert total([gradient], p) == total([dense], p)
    if p in EXACT_NORMS and not dtype.is_complex:
        assert total([gradient], p) == oracle.total_norm([gradient], p)


def test_indices_listed_twice_may_cancel() -> None:
    indices = torch.tensor([[1, 1, 2]])
    gradient = torch.sparse_coo_tensor(
        indices, torch.tensor([[5.0], [-5.0], [3.0]]), (4, 1), check_invariants=True
    )
    assert total([gradient]) == 3.0
    assert total([gradient], 0.0) == 1.0
    assert total([gradient], math.inf) == 3.0


@pytest.mark.parametrize("is_coalesced", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_callers_tensor_is_scaled(dtype: torch.dtype, is_coalesced: bool) -> None:
    gradient = sparse(dtype, is_coalesced=is_coalesced)
    dense = random_values(9, dtype, seed=1)
    old = [gradient.clone(), dense.clone()]
    owners = [torch.nn.Parameter(torch.zeros(SHAPE, dtype=dtype)), parameter(dense)]
    owners[0].grad = gradient
    norm = gradclip.clip_(owners, 0.5, dtype=torch.float64).item()
    assert norm == oracle.total_norm(old) > 0.5
    assert gradient_of(owners[0]) is gradient
    assert gradient.is_coalesced() == is_coalesced, "the list stays as it is"
    assert torch.equal(gradient._indices(), old[0]._indices())
    assert oracle.same_bits(gradient._values(), oracle.clipped(old[0]._values(), norm, 0.5))
    assert oracle.same_bits(dense, oracle.clipped(old[1], norm, 0.5))


@pytest.mark.parametrize("is_coalesced", [True, False])
def test_the_callers_tensor_is_limited(is_coalesced: bool) -> None:
    gradient = sparse(is_coalesced=is_coalesced)
    dense = gradient.to_dense()
    owner = torch.nn.Parameter(torch.zeros(SHAPE))
    owner.grad = gradient
    gradclip.clip_grad_value_([owner], 0.4)
    assert gradient_of(owner) is gradient
    assert torch.equal(gradient.to_dense(), dense.clamp(-0.4, 0.4))
    assert not torch.equal(gradient.to_dense(), dense)


def test_nothing_is_written_below_the_limit() -> None:
    gradient = sparse()
    owner = torch.nn.Parameter(torch.zeros(SHAPE))
    owner.grad = gradient
    values = gradient._values().clone()
    gradclip.clip_([owner], 1e9)
    assert torch.equal(gradient._values(), values)
    assert not gradient.is_coalesced()


def test_a_real_embedding() -> None:
    embedding = torch.nn.Embedding(50, 8, sparse=True)
    rows = torch.tensor([3, 3, 7, 49])
    (embedding(rows) * torch.arange(1.0, 9.0)).sum().backward()
    (weight,) = embedding.parameters()
    assert gradient_of(weight).layout == torch.sparse_coo
    old = gradient_of(weight).to_dense()
    norm = gradclip.clip_(embedding, 2.0, dtype=torch.float64).item()
    assert norm == oracle.total_norm([old])
    torch.testing.assert_close(gradient_of(weight).to_dense(), old * (2.0 / norm))


@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (3, 2)])
def test_sparse_gradients_that_list_nothing(shape: tuple[int, int]) -> None:
    gradients = [torch.zeros(shape).to_sparse(), torch.tensor([2.0])]
    assert gradients[0]._nnz() == 0
    for p in EXACT_NORMS:
        assert total(gradients, p) == oracle.total_norm(gradients, p)
    assert gradclip.clip_(parameters(gradients), 1.0).item() == 2.0


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """All finite numbers of an 8-bit type."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype)
    is_finite = numbers.to(torch.float32).isfinite()
    return numbers.view(torch.uint8)[is_finite].view(dtype)


@pytest.mark.parametrize("p", [*EXACT_NORMS, 3.0])
@pytest.mark.parametrize("dtype", FLOAT8_DTYPES)
def test_norms_of_float8(p: float, dtype: torch.dtype) -> None:
    gradient = every_value(dtype)
    assert total([gradient], p) == total([gradient.to(torch.float32)], p)
    if p != 3.0:
        assert total([gradient], p) == oracle.total_norm([gradient.to(torch.float32)], p)


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES)
@pytest.mark.parametrize("max_norm", [100.0, 1.0, math.inf])
def test_clipped_float8(dtype: torch.dtype, max_norm: float) -> None:
    gradient = every_value(dtype)
    (owner,) = parameters([gradient.clone()])
    norm = gradclip.clip_([owner], max_norm, dtype=torch.float64).item()
    want = oracle.clipped(gradient, norm, max_norm)
    assert gradient_of(owner).dtype == dtype
    assert oracle.same_bits(gradient_of(owner), want)
    assert oracle.same_bits(gradient_of(owner), gradient) == (max_norm == math.inf)


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES)
def test_value_clipping_of_float8(dtype: torch.dtype) -> None:
    gradient = (
        every_value(dtype).view(-1, 2)[:, 1]
        if every_value(dtype).numel() % 2 == 0
        else every_value(dtype)
    )
    old = gradient.to(torch.float32)
    gradclip.clip_grad_value_(parameters([gradient]), 0.5)
    assert torch.equal(gradient.to(torch.float32), old.clamp(-0.5, 0.5))


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES)
def test_not_a_number_in_float8(dtype: torch.dtype) -> None:
    gradient = torch.tensor([math.nan, 1.0]).to(dtype)
    owner, other = parameters([gradient, torch.ones(2)])
    assert math.isnan(gradclip.clip_([owner, other], 1.0))
    assert gradient.to(torch.float32).isnan().all()
    assert gradient_of(other).isnan().all()


def test_every_kind_in_one_list() -> None:
    listed = sparse(torch.float64)
    kinds = [
        torch.tensor([3.0, 4.0]).to(torch.float8_e5m2),
        listed,
        torch.ones(4, 4, 4, dtype=torch.float16)[::2, ::2, ::2],
        torch.full((5,), 2.0, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]),
    ]
    same = [torch.tensor([3.0, 4.0]), listed.to_dense(), *kinds[2:]]
    for p in (0.0, 2.0, math.inf):
        if p == 2.0:
            assert total(kinds, p) == oracle.total_norm(same, p)
        assert total(kinds, p) == total([*same[:2], *(k.clone() for k in same[2:])], p)
    assert total(kinds[::-1]) == total(kinds)


def listed(values: list[float], dtype: torch.dtype, rows: list[int] | None = None) -> torch.Tensor:
    """A sparse vector of 4 elements; all values are listed for row 1 by default."""
    indices = torch.tensor([rows or [1] * len(values)])
    return torch.sparse_coo_tensor(
        indices, torch.tensor(values, dtype=dtype), (4,), check_invariants=False
    )


@pytest.mark.parametrize(
    ("values", "dtype", "wanted"),
    [
        ([1.0, 2.0**-24, 2.0**-24], torch.float32, 1 + 2.0**-23),
        ([6e4, 6e4, -6e4], torch.float16, 6e4),
        ([1e308, 1e308, -1e308], torch.float64, 1e308),
        ([1.0, 1e100, 1.0, -1e100], torch.float64, 2.0),
        ([5e-324, 1.0, -1.0], torch.float64, 5e-324),
        ([2.0**53, 1.0, 2.0**-1074], torch.float64, 2.0**53 + 2),
        ([math.inf, 1.0], torch.float32, math.inf),
        ([math.inf, -math.inf], torch.float32, math.nan),
        ([math.nan, 1.0], torch.float16, math.nan),
        ([448.0, 448.0, 448.0], torch.float8_e4m3fn, 1344.0),
    ],
)
def test_the_order_of_a_list_does_not_matter(
    values: list[float], dtype: torch.dtype, wanted: float
) -> None:
    for order in itertools.permutations(values):
        found = total([listed(list(order), dtype)])
        assert found == wanted or (math.isnan(found) and math.isnan(wanted))


VALUES = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(-4.0, 4.0),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0**-24, 5e-324, 1.7e308, -1.7e308]),
)


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 3), VALUES, VALUES), max_size=12),
    st.sampled_from([*REAL_DTYPES, torch.complex64, torch.complex128, *FLOAT8_DTYPES]),
    st.sampled_from([1.0, 2.0, 0.0, math.inf]),
    st.randoms(use_true_random=False),
)
def test_any_list_is_summed_exactly(
    entries: list[tuple[int, float, float]], dtype: torch.dtype, p: float, random: Random
) -> None:
    if dtype.is_complex and p == 1.0:
        p = 2.0  # |z| is rounded: the oracle has none
    narrow = torch.float32 if dtype.itemsize == 1 else dtype
    limit = torch.finfo(dtype).max
    found = []
    for _ in range(2):
        random.shuffle(entries)
        rows = [row for row, _, _ in entries]
        numbers = [[max(-limit, min(limit, number)) for number in pair] for _, *pair in entries]
        values = torch.tensor(numbers, dtype=torch.float64).reshape(-1, 2)
        values = torch.complex(values, values.flip(1)) if dtype.is_complex else values
        gradient = torch.sparse_coo_tensor(
            torch.tensor([rows], dtype=torch.int64).reshape(1, -1),
            values.to(narrow).to(dtype),
            (4, 2),
            check_invariants=False,
        )
        found.append(total([gradient], p))
        if not (dtype.is_complex and p != 2.0):
            assert found[-1] == oracle.total_norm([gradient], p)
    assert found[0] == found[1]


@pytest.mark.parametrize("owned", [(0, 8), (1, 5), (3, 3), (2, 8)])
@pytest.mark.parametrize("is_coalesced", [True, False])
def test_owned_elements_of_a_list(owned: tuple[int, int], is_coalesced: bool) -> None:
    values = torch.tensor([[1.0, 2.0], [2.0**-24, 4.0], [2.0**-24, 8.0], [16.0, 32.0]])
    gradient = torch.sparse_coo_tensor(
        torch.tensor([[2, 0, 2, 3]]), values, (4, 2), check_invariants=False
    )
    gradient = gradient.coalesce() if is_coalesced else gradient
    part = oracle.dense(gradient).flatten()[owned[0] : owned[1]]
    for p in (0.0, 1.0, 2.0, math.inf):
        sums = reference.sums(gradient, p, owned=owned)
        found = _core.Sums.from_list(sums.tolist()).total(p)
        assert found == oracle.total_norm([part], p)


@pytest.mark.parametrize("dtype", [*REAL_DTYPES, torch.float8_e4m3fn])
def test_limits_take_the_exact_sum(dtype: torch.dtype) -> None:
    for order in itertools.permutations([0.5, 24.0, 448.0, -448.0]):
        gradient = listed([*order, 1.0], dtype, [1, 1, 1, 1, 3])
        owner = torch.nn.Parameter(torch.zeros(4))
        owner.main_grad = gradient  # type: ignore[attr-defined]
        gradclip.clip_grad_value_([owner], 26.0, grad="main_grad")
        values = gradient.coalesce() if dtype.itemsize > 1 else gradient
        assert values._values().float().tolist() == [24.5 if dtype.itemsize > 1 else 24.0, 1.0]


def test_many_repeats_of_wide_rows() -> None:
    """More columns than one block takes, and rows that share few of many entries."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 50, (400,), generator=generator)
    values = torch.randn(400, 1500, generator=generator)
    gradient = torch.sparse_coo_tensor(rows[None], values, (50, 1500), check_invariants=False)
    wide = torch.zeros(50, 1500, dtype=torch.float64).index_add_(0, rows, values.double())
    found = total([gradient])
    assert found == pytest.approx(wide.norm().item(), rel=1e-14)
    order = torch.randperm(400, generator=generator)
    other = torch.sparse_coo_tensor(
        rows[order][None], values[order], (50, 1500), check_invariants=False
    )
    assert total([other]) == found
