"""What a clip comes to, from the exact total: one rule for one process and for all ranks."""

import math
from collections.abc import Iterator

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import gradclip
from gradclip import _core
from tests import oracle
from tests.gradients import gradient_of, parameter

NUMBERS = st.one_of(
    st.floats(0.0, allow_nan=False),
    st.floats(0.0, 100.0),
    st.sampled_from([0.0, 5e-324, 2.0**-1022, 1e308, math.inf]),
)
SCALES = st.one_of(st.floats(2.0**-126, 2.0**126), st.sampled_from([1.0, 65536.0]))


@pytest.fixture(params=[False, True])
def flushing(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Threads that read subnormals as zero must not compute another clip."""
    if request.param and not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormals")
    yield request.param
    torch.set_flush_denormal(False)


def outcome(
    exact: float, p: float, max_norm: float, eps: float, scale: float
) -> tuple[float, float, float]:
    total = exact if p == 0 else exact / scale
    coefficient = oracle.coefficient(total, max_norm, eps)
    if math.isnan(coefficient) and not math.isnan(total):
        coefficient = 1.0
    return total, coefficient, coefficient / scale


@hypothesis.given(
    NUMBERS, st.sampled_from([0.0, 1.0, 2.0, -1.0, math.inf]), NUMBERS, st.floats(0.0, 1.0), SCALES
)
def test_outcomes(exact: float, p: float, max_norm: float, eps: float, scale: float) -> None:
    want = outcome(exact, p, max_norm, eps, scale)
    torch.set_flush_denormal(True)
    try:
        found = _core.clip_outcome(exact, p, max_norm, eps, scale)
    finally:
        torch.set_flush_denormal(False)
    assert found == want


@pytest.mark.parametrize("scale", [1.0, 2.0**100, 2.0**126, 2.0**-126, 1000.0])
@pytest.mark.parametrize("size", [1.0, 1e-300, 1e-315])
def test_a_clip_under_a_loss_scale(scale: float, size: float, flushing: bool, route: str) -> None:
    """Subnormal results included: they are what flushing threads lose."""
    values = torch.tensor([3.0, 4.0], dtype=torch.float64)
    torch.set_flush_denormal(False)
    values = values * size
    exact = oracle.total_norm([values])
    total, _, factor = outcome(exact, 2.0, 1e-310, 0.0, scale)
    want = values * factor
    torch.set_flush_denormal(flushing)
    owner = parameter(values)
    found = gradclip.clip_([owner], 1e-310, scale=scale, eps=0.0)
    torch.set_flush_denormal(False)
    assert found.item() == total
    assert oracle.same_bits(gradient_of(owner), want)


@pytest.mark.parametrize("scale", [1e46, 1e39, 1e-39, 5e-324])
def test_a_scale_that_float32_gradients_would_not_survive(scale: float, route: str) -> None:
    owner = parameter(torch.tensor([3.0, 4.0]))
    with pytest.raises(ValueError, match=r"`scale` is .* from 2\*\*-126 to 2\*\*126"):
        gradclip.clip_([owner], 1.0, scale=scale)
    assert gradient_of(owner).tolist() == [3.0, 4.0]
