"""Largest and smallest magnitudes, and the number of non-zero elements."""

import math
from typing import Any

import pytest
import torch

from gradclip import _core
from tests import oracle

from .launch import Segment, segment, sums

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
KINDS = [("count", 0.0), ("max", math.inf), ("min", -math.inf)]


def check(tensors: list[torch.Tensor], kind: str, p: float, **options: Any) -> None:
    segments = [segment(tensor, number) for number, tensor in enumerate(tensors)]
    space = sums(kind, tensors[0].dtype, segments, **options)
    expected = _core.Gradients.from_tensors(tensors).sums(p, 1).to_list()
    assert space.output.tolist() == expected
    total = oracle.total_norm(tensors, p)
    assert space.total == total or (math.isnan(space.total) and math.isnan(total))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "p"), KINDS)
class TestExtremes:
    def test_gaussian(self, dtype: torch.dtype, kind: str, p: float) -> None:
        check([torch.randn(size).to(dtype) for size in (1, 2, 9, 3000)], kind, p)

    def test_odd_addresses_and_rows(self, dtype: torch.dtype, kind: str, p: float) -> None:
        whole = torch.randn(50, 70).to(dtype)
        check([whole[:, 1:6], whole[:, 10:11], whole[0, 21:70]], kind, p, chunk=128)

    def test_zeros(self, dtype: torch.dtype, kind: str, p: float) -> None:
        values = torch.randn(1500).to(dtype)
        values[::3] = 0
        values[1] = -0.0
        check([values], kind, p)

    def test_subnormals_and_the_largest(self, dtype: torch.dtype, kind: str, p: float) -> None:
        info = torch.finfo(dtype)
        ends = [info.smallest_normal / 2, -info.smallest_normal, info.max, 1.0]
        check([torch.tensor(ends, dtype=torch.float64).to(dtype)], kind, p)

    @pytest.mark.parametrize(
        ("bad", "place"), [(math.nan, 0), (math.inf, 1001), (-math.inf, 500), (math.nan, 1)]
    )
    def test_not_finite(
        self, dtype: torch.dtype, kind: str, p: float, bad: float, place: int
    ) -> None:
        values = torch.randn(1002).to(dtype)
        values[place] = bad
        check([torch.randn(10).to(dtype), values], kind, p, grid=1)

    def test_nothing_but_nan(self, dtype: torch.dtype, kind: str, p: float) -> None:
        check([torch.full((5,), math.nan, dtype=dtype)], kind, p)

    def test_weight(self, dtype: torch.dtype, kind: str, p: float) -> None:
        values = torch.randn(40).to(dtype)
        values[3] = math.inf
        space = sums(kind, dtype, [Segment(values.data_ptr(), 1, 40, 40, 5)])
        expected = _core.Gradients.from_tensors([values.expand(5, 40)]).sums(p, 1)
        assert space.output.tolist() == expected.to_list()
