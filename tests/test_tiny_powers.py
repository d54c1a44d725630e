"""p near 0: the norm is that of the exact powers, or leaves float64's range as it does."""

import functools
import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from mpmath import mp, mpf  # type: ignore[import-untyped]

import gradclip
from gradclip import _core, cuda, reference
from tests import oracle
from tests.gradients import REAL_DTYPES, gradient_of, parameter, parameters, random_values, total

TINY = [1e-20, 5e-324, 1e-4, 2.0**-12 * (1 - 2.0**-53)]


def rounded(number: mpf) -> float:
    """A positive number of any size in float64."""
    with mp.workprec(2000):
        if number > mpf(2) ** 1025:
            return math.inf
        return 0.0 if number < mpf(2) ** -1076 else float(number)


def test_two_elements_leave_the_range(route: str) -> None:
    for p, wanted, left in ((1e-20, math.inf, [0.0, 0.0]), (-1e-20, 0.0, [3.0, 4.0])):
        owner = parameter(torch.tensor([3.0, 4.0]))
        assert gradclip.clip_([owner], 1.0, p).item() == wanted
        assert gradient_of(owner).tolist() == left


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("p", TINY)
def test_one_element_is_its_own_norm(p: float, sign: int, route: str) -> None:
    for value in (3.0, -1e-310, 1.7e308, 5e-324):
        one = torch.tensor([value], dtype=torch.float64)
        assert total([one], sign * p) == abs(value)
        assert total([one, torch.zeros(0)], sign * p) == abs(value)
        beside = total([one, torch.zeros(3)], sign * p)
        assert beside == (abs(value) if sign > 0 else 0.0)


@pytest.mark.parametrize("p", [1e-20, -1e-20])
def test_what_is_not_finite(p: float, route: str) -> None:
    inf, nan = math.inf, math.nan
    for values, positive, negative in (
        ([inf], inf, inf),
        ([inf, 2.0], inf, 2.0),
        ([inf, 2.0, 3.0], inf, 0.0),
        ([inf, 0.0], inf, 0.0),
        ([0.0], 0.0, 0.0),
        ([], 0.0, 0.0),
        ([nan, 2.0], nan, nan),
    ):
        found = total([torch.tensor(values)], p)
        wanted = positive if p > 0 else negative
        assert found == wanted or (math.isnan(found) and math.isnan(wanted)), values


VALUES = st.one_of(
    st.just(0.0),
    st.floats(-(2.0**100), 2.0**100, width=32),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([1.0, -5e-324, 1.7e308]),
)


@hypothesis.given(
    st.lists(st.lists(VALUES, max_size=3), min_size=1, max_size=3),
    st.sampled_from([*TINY, 1 / 4096, 1 / 3000, 1 / 1100]),
    st.sampled_from([1, -1]),
)
def test_any_list(lists: list[list[float]], p: float, sign: int) -> None:
    tensors = [torch.tensor(values, dtype=torch.float64) for values in lists]
    values = [abs(value) for value in oracle.elements(tensors)]
    p *= sign
    finite = [value for value in values if value]
    with mp.workprec(400):
        if not finite or (p < 0 and len(finite) < len(values)):
            wanted = mpf(0)
        elif len(finite) == 1:
            wanted = mpf(finite[0])
        elif abs(p) < 1e-6:
            wanted = mpf(2) ** (2000 * sign)
        else:
            wanted = sum((mpf(value) ** mpf(p) for value in finite), mpf(0)) ** (1 / mpf(p))
    found = total(tensors, p)
    if abs(p) < 1 / 4096:
        assert found == rounded(wanted)
    elif 0 < rounded(wanted) < math.inf and 0 < found < math.inf:
        assert oracle.ulps_apart(found, wanted) <= 2 / abs(p)
    else:
        assert found == pytest.approx(rounded(wanted), rel=1e-12)


@pytest.mark.parametrize("p", [0.1, 0.03, 0.004, 0.0008, -0.1, -0.02, -0.0008])
@pytest.mark.parametrize("dtype", REAL_DTYPES)
def test_small_powers_are_as_near_as_their_terms_allow(
    p: float, dtype: torch.dtype, route: str
) -> None:
    """Terms within one unit, an exact sum: 1 / p units of the root."""
    for count in (1, 2, 40):
        gradient = random_values(count, dtype, spread=8, seed=count)
        gradient = gradient[gradient != 0]
        wanted = oracle.total_norm_to_many_digits([gradient], p)
        if 0 < rounded(wanted) < math.inf:
            assert oracle.ulps_apart(total([gradient], p), wanted) <= 2 / abs(p)
        else:
            assert total([gradient], p) == rounded(wanted)


def sums_of(core: _core.Gradients, p: float) -> torch.Tensor:
    return torch.tensor(core.sums(p, 1).to_list())


@pytest.mark.parametrize("p", [1e-20, -1e-20])
@pytest.mark.parametrize("dtype", [*REAL_DTYPES, torch.complex64])
def test_both_paths_take_the_same_sums(p: float, dtype: torch.dtype) -> None:
    values = torch.zeros(70_000, dtype=dtype)
    values[777] = -2.5
    for gradient in (values, values[700:800].expand(5, 100), values[777:778].expand(70_000)):
        core = _core.Gradients.from_tensors([gradient])
        engine = core.sums(p, 2).to_list()
        assert reference.sums(gradient, p).tolist() == engine
        assert core.sums_each(p, 2)[0].to_list() == engine
        found = cuda._tiny(functools.partial(sums_of, core), p)
        assert _core.Sums.from_list(found.tolist()).to_list()[:141] == engine[:141]
    owners = parameters([values])
    assert gradclip.grad_norms([*owners, parameter(torch.tensor([3.0]))], abs(p)).tolist() == [
        2.5,
        3,
    ]
