"""Sparse and 8-bit gradients: torch operations take them, beside others in one list."""

import math

import pytest
import torch

import gradclip
from tests import oracle
from tests.gradients import (
    EXACT_NORMS,
    FLOAT8_DTYPES,
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
    dense = gradient.coalesce().to_dense()
    assert total([gradient], p) == total([dense], p)
    if p in EXACT_NORMS and not dtype.is_complex:
        assert total([gradient], p) == oracle.total_norm([dense], p)


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
    old = [gradient.coalesce().to_dense(), dense.clone()]
    owners = [torch.nn.Parameter(torch.zeros(SHAPE, dtype=dtype)), parameter(dense)]
    owners[0].grad = gradient
    norm = gradclip.clip_(owners, 0.5, dtype=torch.float64).item()
    assert norm == oracle.total_norm(old) > 0.5
    assert gradient_of(owners[0]) is gradient
    after = gradient_of(owners[0]).coalesce().to_dense()
    want = oracle.clipped(old[0], norm, 0.5)
    if is_coalesced:
        assert oracle.same_bits(after, want)
    torch.testing.assert_close(after, want)
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
