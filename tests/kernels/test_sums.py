"""Sums of squares, magnitudes and cubes: exact, whatever the values, the chunks and the grid."""

import math
from typing import Any

import pytest
import torch

from gradclip import _core
from tests import oracle

from .launch import FINISH, NOTHING, Segment, Workspace, segment, sums

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
ORDERS = [1, 2, 3]


def cpu_sums(tensors: list[torch.Tensor], p: float) -> list[int]:
    """The same sums by the CPU engine."""
    return _core.Gradients.from_tensors(tensors).sums(p, 1).to_list()


def check(tensors: list[torch.Tensor], p: int, **options: Any) -> None:
    """The sums have the CPU engine's bits, the total the oracle's (p = 3: to one ulp)."""
    segments = [segment(tensor, number) for number, tensor in enumerate(tensors)]
    space = sums(f"sums_{p}", tensors[0].dtype, segments, max_norm=0.5, **options)
    assert space.output.tolist() == cpu_sums(tensors, p)
    total = oracle.total_norm(tensors, p)
    if p == 3 and math.isfinite(total):  # its terms are rounded
        assert abs(space.total - total) <= math.ulp(total)
        total = _core.Sums.from_list(space.output.tolist()).total(p) or 0.0
    assert space.total == total or (math.isnan(space.total) and math.isnan(total))
    expected = oracle.coefficient(total, 0.5)
    assert space.coefficient == expected or math.isnan(expected)


def orders_of(dtype: torch.dtype) -> list[int]:
    return [1, 2] if dtype == torch.float64 else ORDERS


CASES = [(p, dtype) for dtype in DTYPES for p in orders_of(dtype)]


def spread(dtype: torch.dtype, size: int, sigma: float) -> torch.Tensor:
    """Log-normal magnitudes of either sign, as far as the dtype goes."""
    generator = torch.Generator().manual_seed(size)
    powers = torch.randn(size, generator=generator, dtype=torch.float64) * sigma
    limit = math.log(torch.finfo(dtype).max) * 0.99
    values = powers.clamp(-limit, limit).exp()
    return (values * torch.randn(size, generator=generator, dtype=torch.float64).sign()).to(dtype)


@pytest.mark.parametrize(("p", "dtype"), CASES)
class TestValues:
    def test_gaussian_of_many_sizes(self, p: int, dtype: torch.dtype) -> None:
        sizes = (1, 2, 7, 8, 129, 1000, 4099)
        check([(torch.randn(size) * 3e-3).to(dtype) for size in sizes], p)

    def test_chunks_that_are_cut(self, p: int, dtype: torch.dtype) -> None:
        check([torch.randn(5000).to(dtype), torch.randn(3000).to(dtype)], p, chunk=1024)

    def test_odd_addresses(self, p: int, dtype: torch.dtype) -> None:
        whole = torch.randn(3000).to(dtype)
        before = whole.clone()
        check([whole[1:998], whole[1003:2000], whole[2001:2002]], p)
        assert torch.equal(whole, before)

    def test_rows(self, p: int, dtype: torch.dtype) -> None:
        whole = torch.randn(60, 90).to(dtype)
        check([whole[:, 3:77], whole[:, 80:81]], p, chunk=512)

    def test_heavy_tails(self, p: int, dtype: torch.dtype) -> None:
        check([spread(dtype, 4000, 8.0)], p)

    def test_every_exponent(self, p: int, dtype: torch.dtype) -> None:
        info = torch.finfo(dtype)
        low, high = math.log2(info.smallest_normal) - 60, math.log2(info.max) / (1 + (p > 1)) - 8
        values = torch.linspace(low, high, 3000, dtype=torch.float64).exp2()
        check([values.to(dtype)[torch.randperm(3000)]], p)

    def test_one_huge_among_tiny(self, p: int, dtype: torch.dtype) -> None:
        tiny = torch.randn(2000, dtype=torch.float64) * float(torch.finfo(dtype).smallest_normal)
        values = (tiny * 100).to(dtype)
        values[1500] = 100.0
        check([values], p)

    @pytest.mark.parametrize("width", [20, 24, 30])
    def test_small_and_none_among_ordinary(self, p: int, dtype: torch.dtype, width: int) -> None:
        """Magnitudes over 2**width, and zeros: in runs, before and after them, and in rows."""
        generator = torch.Generator().manual_seed(width)
        uniform = torch.rand(5, 3001, generator=generator, dtype=torch.float64)
        values = torch.exp2(-width * uniform) * torch.randn(5, 3001, generator=generator).sign()
        values = values.to(dtype) * (uniform < 0.9)
        check([values[0], values[1, 1:], values[2:4, 7:70], values[4, ::3, None]], p)

    def test_one_tiny_among_ordinary(self, p: int, dtype: torch.dtype) -> None:
        values = torch.randn(3000).to(dtype)
        values[2500] = torch.finfo(dtype).smallest_normal / 4
        check([values], p)

    def test_no_small_one_loses_a_bit(self, p: int, dtype: torch.dtype) -> None:
        """Beside ones that fix the window, an odd significand at every depth below it."""
        depths = range(10, 72) if dtype != torch.float16 else range(14)
        values = torch.ones(len(depths), 300, dtype=dtype)
        for row, depth in zip(values, depths, strict=True):
            row[290] = (1 + torch.finfo(dtype).eps) * 2.0**-depth
        check([*values], p)

    def test_subnormals(self, p: int, dtype: torch.dtype) -> None:
        info = torch.finfo(dtype)
        step = info.smallest_normal * info.eps
        check([(torch.arange(-500, 500, dtype=torch.float64) * step).to(dtype)], p)

    def test_zeros_before_the_rest(self, p: int, dtype: torch.dtype) -> None:
        values = torch.zeros(5000, dtype=dtype)
        values[4000:4100] = torch.randn(100).to(dtype)
        check([values, torch.zeros(17, dtype=dtype)], p, chunk=2048)

    def test_nothing_but_zeros(self, p: int, dtype: torch.dtype) -> None:
        check([torch.zeros(300, dtype=dtype), -torch.zeros(3, dtype=dtype)], p)

    @pytest.mark.parametrize(
        ("bad", "place"), [(math.nan, 0), (math.inf, 1999), (-math.inf, 700), (math.nan, 1)]
    )
    def test_not_finite(self, p: int, dtype: torch.dtype, bad: float, place: int) -> None:
        values = torch.randn(2000).to(dtype)
        values[place] = bad
        values[1000] = math.inf
        check([torch.randn(100).to(dtype), values], p)

    def test_nothing_finite(self, p: int, dtype: torch.dtype) -> None:
        check([torch.full((300,), math.nan, dtype=dtype)], p)
        check([torch.full((300,), -math.inf, dtype=dtype)], p)


@pytest.mark.parametrize(("p", "dtype"), CASES)
@pytest.mark.parametrize("weight", [3, 65536, 10**12 + 7])
def test_weight_counts_copies(p: int, dtype: torch.dtype, weight: int) -> None:
    values = torch.randn(500).to(dtype)
    values[7] = math.inf
    copies = Segment(values.data_ptr(), 1, 500, 500, weight)
    space = sums(f"sums_{p}", dtype, [copies])
    expanded = values.expand(weight, 500)
    assert space.output.tolist() == cpu_sums([expanded], p)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("grid", "chunk"), [(1, 4096), (2, 512), (7, 100), (40, 3)])
def test_bits_do_not_depend_on_the_split(dtype: torch.dtype, grid: int, chunk: int) -> None:
    tensors = [spread(dtype, 600, 4.0), torch.randn(333).to(dtype)]
    check(tensors, 2, grid=grid, chunk=chunk)


@pytest.mark.parametrize("scale", [2.0**600, 2.0**-600, 2.0**-1022])
def test_float64_beyond_the_range_of_squares(scale: float) -> None:
    check([torch.randn(500, dtype=torch.float64) * scale], 2)


def test_float64_from_end_to_end() -> None:
    ends = [1.7e308, 5e-324, -3e-310, 1e-200, 7.0, 1e153]
    check([torch.tensor(ends, dtype=torch.float64)], 2)


def test_dtypes_add_up_in_one_workspace() -> None:
    narrow, wide = torch.randn(900).bfloat16(), torch.randn(700)
    space = Workspace()
    sums("sums_2", torch.bfloat16, [segment(narrow)], then=NOTHING.value, workspace=space)
    sums("sums_2", torch.float32, [segment(wide)], then=FINISH.value, workspace=space)
    assert space.total == oracle.total_norm([narrow, wide])


def test_details_hold_each_tensor() -> None:
    tensors = [torch.randn(size) for size in (10, 3000, 1)]
    tensors[1][5] = math.nan
    details = torch.zeros(3, 144, dtype=torch.int64)
    segments = [segment(tensor, number) for number, tensor in enumerate(tensors)]
    sums("sums_2", torch.float32, segments, chunk=1000, details=details)
    for tensor, row in zip(tensors, details.tolist(), strict=True):
        row[141] ^= -(1 << 63)
        assert _core.Sums.from_list(row).to_list() == cpu_sums([tensor], 2)


def test_loss_scale_divides_total_and_factor() -> None:
    values = torch.randn(1000)
    space = sums("sums_2", torch.float32, [segment(values)], max_norm=0.01, loss_scale=1024.0)
    total = oracle.total_norm([values]) / 1024
    assert space.total == total
    assert space.result[2].item() == oracle.coefficient(total, 0.01) / 1024


@pytest.mark.parametrize("max_norm", [0.0, 1.0, 1e300, math.inf])
def test_coefficient(max_norm: float) -> None:
    values = torch.tensor([3.0, 4.0])
    space = sums("sums_2", torch.float32, [segment(values)], max_norm=max_norm)
    assert space.coefficient == (1.0 if max_norm > 5 else oracle.coefficient(5.0, max_norm))
    assert space.result.view(torch.float32)[6].item() == 5.0


def test_infinite_limit_keeps_what_is_not_finite() -> None:
    values = torch.tensor([math.inf, 1.0])
    space = sums("sums_2", torch.float32, [segment(values)], max_norm=math.inf)
    assert space.coefficient == 1.0


@pytest.mark.parametrize("large", [2.0**59, 2.0**60, 2.0**127])
@pytest.mark.parametrize("small", [2.0**42.9, 2.0**105])
def test_cubes_beyond_float32_in_the_window_of_the_chunk_before(large: float, small: float) -> None:
    """A chunk that begins with zeros keeps the window; its elements are small there."""
    late = torch.zeros(300, dtype=torch.bfloat16)
    late[200:] = small
    check([torch.tensor([large], dtype=torch.bfloat16), late], 3, grid=1)
