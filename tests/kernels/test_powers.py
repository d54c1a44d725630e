"""Other norm types and complex moduli."""

import math

import pytest
import torch
from mpmath import mp, mpf  # type: ignore[import-untyped]

from gradclip import _core
from tests import oracle

from .launch import Workspace, powers, segment

REAL = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
POWER = 3


def cpu(tensors: list[torch.Tensor], p: float, scale: _core.PowerScale | None = None) -> list[int]:
    return _core.Gradients.from_tensors(tensors).sums(p, 1, scale).to_list()


def total(space: Workspace, p: float, scale: _core.PowerScale | None = None) -> float:
    """The host's root of what was collected."""
    found = _core.Sums.from_list(space.output.tolist()).total(p, scale)
    assert found is not None
    return found


def launched(tensors: list[torch.Tensor], kind: int, p: float, **scale: float) -> Workspace:
    segments = [segment(tensor) for tensor in tensors]
    return powers(tensors[0].dtype, segments, kind, p, **scale)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("p", [3, 4, 5, 7])
def test_integer_powers_have_the_bits_of_the_cpu(dtype: torch.dtype, p: int) -> None:
    tensors = [torch.randn(700).to(dtype), torch.tensor([math.inf, 0.0, 1e-3]).to(dtype)]
    space = launched(tensors, POWER, float(p))
    assert space.output.tolist() == cpu(tensors, float(p))
    assert total(space, float(p)) == math.inf


@pytest.mark.parametrize("dtype", COMPLEX)
@pytest.mark.parametrize(
    ("kind", "p"), [(0, 0.0), (1, 1.0), (POWER, 3.0), (4, math.inf), (5, -math.inf)]
)
def test_complex_moduli_have_the_bits_of_the_cpu(dtype: torch.dtype, kind: int, p: float) -> None:
    values = torch.randn(600, dtype=dtype)
    values[5] = torch.tensor(complex(3e-38, 4e-38))
    values[9] = 0
    values[11] = torch.tensor(complex(0.0, -2.5))
    for bad in (1.0, math.inf, math.nan):
        values[7] = torch.tensor(complex(1.0, bad))
        assert launched([values], kind, p).output.tolist() == cpu([values], p)


def test_complex_rows() -> None:
    values = torch.randn(30, 40, dtype=torch.complex64)[:, 2:35]
    assert launched([values], 1, 1.0).output.tolist() == cpu([values], 1.0)


@pytest.mark.parametrize("p", [0.5, 2.5, 3.7, -1.0, -2.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_fractional_powers_are_near_the_exact_norm(dtype: torch.dtype, p: float) -> None:
    values = (torch.rand(300, dtype=torch.float64) + 0.01).to(dtype)
    found = total(launched([values], POWER, p), p)
    mp.prec = 200
    exact = sum((mpf(v) ** mpf(p) for v in values.double().tolist()), mpf(0)) ** (1 / mpf(p))
    assert abs(found - exact) <= 4 * math.ulp(float(exact))


@pytest.mark.parametrize(
    ("values", "expected"),
    [([2.0, 0.0], 0.0), ([math.inf, 2.0], 2.0), ([math.inf], math.inf), ([math.nan, 1], math.nan)],
)
def test_negative_powers(values: list[float], expected: float) -> None:
    found = total(launched([torch.tensor(values)], POWER, -1.0), -1.0)
    assert found == expected or (math.isnan(expected) and math.isnan(found))


def test_terms_out_of_range_ask_for_a_scale() -> None:
    values = [torch.tensor([1e38, 3e-39, 7.0])]
    first = launched(values, POWER, 10.0)
    assert first.output.tolist() == cpu(values, 10.0)
    assert first.output[140] == 2
    scale = _core.Gradients.from_tensors(values).sums(math.inf, 1).scale(10.0)
    assert scale.exponent is not None
    second = launched(values, POWER, 10.0, exponent=scale.exponent)
    assert second.output.tolist() == cpu(values, 10.0, scale)
    assert total(second, 10.0, scale) == oracle.total_norm(values, 10)


def test_a_divisor_for_very_large_p() -> None:
    values = [torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)]
    scale = _core.Gradients.from_tensors(values).sums(math.inf, 1).scale(1001.0)
    assert scale.divisor == 3.0
    space = launched(values, POWER, 1001.0, divisor=3.0)
    assert space.output.tolist() == cpu(values, 1001.0, scale)
