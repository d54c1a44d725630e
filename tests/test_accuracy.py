"""The total norm against exact arithmetic, over condition numbers, ranges and norm types."""

import math

import pytest
import torch

import gradclip
from tests import oracle
from tests.gradients import (
    EXACT_NORMS,
    FULL_SPREAD,
    REAL_DTYPES,
    gradient_of,
    parameters,
    random_values,
    total,
)


def gradients_with_spread(dtype: torch.dtype, spread: int) -> list[torch.Tensor]:
    sizes = [1, 300, 7, 4097]
    return [random_values(size, dtype, spread=spread, seed=size) for size in sizes]


@pytest.mark.parametrize("p", EXACT_NORMS)
@pytest.mark.parametrize("dtype", REAL_DTYPES)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_exact_norms_of_any_spread(p: float, dtype: torch.dtype, share: float, route: str) -> None:
    gradients = gradients_with_spread(dtype, int(share * FULL_SPREAD[dtype]))
    assert total(gradients, p) == oracle.total_norm(gradients, p)


@pytest.mark.parametrize("condition_bits", [0, 26, 53, 106, 200])
def test_squares_of_any_condition(condition_bits: int, route: str) -> None:
    """Many small squares beside one large one: a float64 sum would lose them all."""
    large = torch.tensor([2.0 ** (condition_bits // 2)], dtype=torch.float64)
    small = torch.full((1000,), 1.0 + 2.0**-40, dtype=torch.float64)
    for gradients in ([large, small], [small, large]):
        assert total(gradients) == oracle.total_norm(gradients)


@pytest.mark.parametrize("p", EXACT_NORMS)
@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (torch.float32, [1e-45, 3e38]),
        (torch.float32, [1e-45, 1e-45, 1e-45]),
        (torch.float32, [3.4028234663852886e38] * 4096),
        (torch.float64, [1e-320, 1e308]),
        (torch.float64, [5e-324]),
        (torch.float64, [5e-324] * 3),
        (torch.float64, [1e308]),
        (torch.float64, [1.7976931348623157e308]),
        (torch.float64, [1.7e308, 1.7e308]),
        (torch.float16, [6e-8, 65504.0]),
        (torch.bfloat16, [9.2e-41, 3.3895313892515355e38]),
    ],
)
def test_ends_of_the_range(p: float, dtype: torch.dtype, values: list[float], route: str) -> None:
    gradient = torch.tensor(values, dtype=dtype)
    assert gradient.count_nonzero() == len(values)
    assert total([gradient], p) == oracle.total_norm([gradient], p)


def test_an_infinite_total_only_when_it_truly_is(route: str) -> None:
    largest = torch.tensor([1.7976931348623157e308], dtype=torch.float64)
    twice = [largest, largest.clone()]
    assert total(twice) == math.inf == oracle.total_norm(twice)
    assert total([largest, largest / 2.0**600]) == 1.7976931348623157e308


def test_ties_go_to_even(route: str) -> None:
    """Sums exactly between two float64: 2**53 + 1 and 2**53 + 3."""
    for low_part, wanted in ((1.0, 2.0**53), (3.0, 2.0**53 + 4)):
        gradients = [torch.tensor([2.0**53, low_part], dtype=torch.float64)]
        assert total(gradients, 1.0) == wanted == oracle.total_norm(gradients, 1.0)


def test_the_root_is_decided_by_the_exact_remainder(route: str) -> None:
    """The root of (2**53 + 1)**2 is a tie; the tiniest square more decides it upwards."""
    parts = torch.tensor([2.0**53, 2.0**27, 1.0], dtype=torch.float64)
    assert sum(int(part) ** 2 for part in parts.tolist()) == (2**53 + 1) ** 2
    assert total([parts]) == 2.0**53
    assert total([parts, torch.tensor([2.0**-500], dtype=torch.float64)]) == 2.0**53 + 2


@pytest.mark.parametrize("p", [3.0, 4.0, 5.0, 7.0, 12.0, 64.0, 100.0])
@pytest.mark.parametrize("dtype", [*REAL_DTYPES])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_integer_norms(p: float, dtype: torch.dtype, share: float, route: str) -> None:
    spread = int(share * FULL_SPREAD[dtype])
    gradients = [random_values(n, dtype, spread=spread, seed=n) for n in (1, 60, 15)]
    bound = 2 if p <= 4 else 4
    assert oracle.ulps_apart(total(gradients, p), oracle.total_norm(gradients, p)) <= bound


@pytest.mark.parametrize("p", [1.5, 0.5, 2.5, 100.0, -1.0, -2.0, -0.5, 0.01])
@pytest.mark.parametrize("dtype", REAL_DTYPES)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_real_norms(p: float, dtype: torch.dtype, share: float, route: str) -> None:
    spread = int(share * FULL_SPREAD[dtype])
    gradients = [random_values(n, dtype, spread=spread, seed=n) for n in (1, 60, 15)]
    gradients = [gradient[gradient != 0] for gradient in gradients]
    want = oracle.total_norm_to_many_digits(gradients, p)
    # the root of a sum that is one unit off is 1 / p units off
    bound = 4 if abs(p) >= 0.5 else 2 / abs(p)
    assert oracle.ulps_apart(total(gradients, p), want) <= bound


@pytest.mark.parametrize("p", [1e4, 1e6, -1e4])
def test_huge_powers_tend_to_the_extremes(p: float, route: str) -> None:
    gradients = [torch.tensor([3.0, 2.0, 1.0])]
    want = oracle.total_norm_to_many_digits(gradients, p)
    assert oracle.ulps_apart(total(gradients, p), want) <= 4


@pytest.mark.parametrize("scale", [2.0**-1000, 1e-300, 1.0, 1e300])
@pytest.mark.parametrize("p", [3.0, 0.5, 100.0, -3.0])
def test_no_overflow_or_underflow_of_a_representable_result(
    scale: float, p: float, route: str
) -> None:
    gradients = [torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64) * scale]
    want = oracle.total_norm_to_many_digits(gradients, p)
    assert oracle.ulps_apart(total(gradients, p), want) <= 4


def test_the_hundredth_norm_of_small_integers(route: str) -> None:
    assert total([torch.tensor([3.0, 2.0, 1.0])], 100.0) == 3.0


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_complex_numbers(dtype: torch.dtype, share: float, route: str) -> None:
    gradient = random_values(200, dtype, spread=int(share * FULL_SPREAD[dtype]), seed=3)
    assert total([gradient]) == oracle.total_norm([gradient])
    pairs = torch.view_as_real(gradient)
    moduli = [oracle.nearest_root_of_squares(pair) for pair in pairs.tolist()]
    magnitudes = torch.tensor(moduli, dtype=torch.float64)
    assert total([gradient], math.inf) == max(moduli)
    assert total([gradient], -math.inf) == min(moduli)
    assert total([gradient], 0.0) == sum(modulus != 0 for modulus in moduli)
    assert total([gradient], 1.0) == oracle.total_norm([magnitudes], 1.0)


@pytest.mark.parametrize("dtype", [*REAL_DTYPES, torch.complex64, torch.complex128])
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 0.0])
def test_clipped_gradients_have_the_oracles_bits(
    dtype: torch.dtype, max_norm: float, route: str
) -> None:
    gradients = [random_values(n, dtype, spread=8, seed=n) for n in (1, 7, 4096, 4099)]
    norm = oracle.total_norm(gradients)
    assert norm > 1
    owners = parameters(gradient.clone() for gradient in gradients)
    gradclip.clip_(owners, max_norm)
    for owner, gradient in zip(owners, gradients, strict=True):
        assert oracle.same_bits(gradient_of(owner), oracle.clipped(gradient, norm, max_norm))


def test_eps_and_its_absence() -> None:
    for eps in (1e-6, 0.0, 0.5):
        owner = parameters([torch.tensor([3.0, 4.0])])[0]
        gradclip.clip_(owner, 1.0, eps=eps)
        want = oracle.clipped(torch.tensor([3.0, 4.0]), 5.0, 1.0, eps)
        assert oracle.same_bits(gradient_of(owner), want)


def test_coefficient_comes_from_the_unrounded_norm() -> None:
    gradients = [random_values(1000, torch.float32, seed=5)]
    norm = oracle.total_norm(gradients)
    assert torch.tensor(norm, dtype=torch.bfloat16).item() != norm
    owners = parameters(gradient.clone() for gradient in gradients)
    assert gradclip.clip_(owners, 1.0, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert oracle.same_bits(gradient_of(owners[0]), oracle.clipped(gradients[0], norm, 1.0))


def test_grad_norms_in_one_pass(route: str) -> None:
    gradients = [random_values(n, torch.float32, spread=20, seed=n) for n in (5, 300, 1)]
    gradients += [torch.zeros(0), torch.ones(2, dtype=torch.float64), torch.zeros(3)]
    owners = parameters(gradients)
    for p in EXACT_NORMS:
        norms = gradclip.grad_norms(owners, p)
        assert norms.dtype == torch.float64
        assert norms.tolist() == [oracle.total_norm([gradient], p) for gradient in gradients]
    owners.insert(1, torch.nn.Parameter(torch.ones(3)))
    assert gradclip.grad_norms(owners)[1] == 0
    # a list whose terms leave float64's range for one parameter alone
    far = parameters([torch.tensor([3e-200], dtype=torch.float64), torch.tensor([2.0])])
    assert gradclip.grad_norms(far, 3.0).tolist() == [3e-200, 2.0]
