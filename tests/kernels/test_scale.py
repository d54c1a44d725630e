"""Writing in place: the oracle's bits inside, untouched bytes around."""

import math

import pytest
import torch

from tests import oracle

from .launch import DTYPES, run, segment, work_list

REAL = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def change(kernel: str, tensors: list[torch.Tensor], number: object, chunk: int = 1024) -> None:
    table, owners = work_list([segment(tensor) for tensor in tensors], chunk)
    turns = torch.zeros(2, dtype=torch.int32)
    run(f"{kernel}_{DTYPES[tensors[0].dtype]}", 3, (table, owners, number, turns, len(owners)))
    assert not turns.any()


def views(whole: torch.Tensor) -> list[torch.Tensor]:
    """Odd starts and lengths, rows, and gaps between them all."""
    rows = whole[5000:11000].view(60, 100)[:, 3:77]
    return [whole[1:4000], whole[4003:4004], rows]


@pytest.mark.parametrize("dtype", REAL)
class TestScale:
    @pytest.mark.parametrize("factor", [0.3, 1e-30, 0.0, 2.0])
    def test_equals_the_oracle_and_leaves_the_rest(self, dtype: torch.dtype, factor: float) -> None:
        whole = torch.randn(12000).to(dtype)
        expected = whole.clone()
        for view in views(expected):
            wide = view if dtype == torch.float64 else view.float()
            view.copy_((wide * torch.tensor(factor, dtype=wide.dtype)).to(dtype))
        change("scale", views(whole), torch.tensor([factor], dtype=torch.float64))
        assert torch.equal(whole, expected)

    def test_coefficient_of_the_oracle(self, dtype: torch.dtype) -> None:
        values = torch.randn(3000).to(dtype)
        expected = oracle.clipped(values, 50.0, 1.0)
        factor = torch.tensor([oracle.coefficient(50.0, 1.0)], dtype=torch.float64)
        change("scale", [values], factor)
        assert torch.equal(values, expected)

    def test_one_writes_nothing(self, dtype: torch.dtype) -> None:
        values = torch.tensor([1.0, math.nan]).to(dtype)
        bits = values.view(torch.uint8).clone()
        values_of = torch.tensor([1.0], dtype=torch.float64)
        change("scale", [values], values_of)
        assert torch.equal(values.view(torch.uint8), bits)

    def test_nan_spreads(self, dtype: torch.dtype) -> None:
        values = torch.randn(100).to(dtype)
        change("scale", [values], torch.tensor([math.nan], dtype=torch.float64))
        assert values.isnan().all()

    def test_limit(self, dtype: torch.dtype) -> None:
        whole = (torch.randn(12000) * 3).to(dtype)
        whole[7], whole[9], whole[11] = math.nan, math.inf, -math.inf
        expected = whole.clone()
        for view in views(expected):
            view.clamp_(-0.75, 0.75)
        change("clamp", views(whole), 0.75)
        assert torch.equal(whole.isnan(), expected.isnan())
        assert torch.equal(whole.nan_to_num(), expected.nan_to_num())
