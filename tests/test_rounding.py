"""float64 to any narrower type in one rounding: totals, limits, on any tensor."""

import math
from collections.abc import Callable

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import gradclip
from gradclip import _core, rounding, totals
from tests import oracle
from tests.gradients import FLOAT8_DTYPES, gradient_of, parameter

NARROW = [torch.bfloat16, torch.float16, *FLOAT8_DTYPES]
ABOVE_A_TIE = {
    torch.bfloat16: 1 + 2.0**-8,
    torch.float16: 1 + 2.0**-11,
    torch.float8_e4m3fn: 1 + 2.0**-4,
    torch.float8_e4m3fnuz: 1 + 2.0**-4,
    torch.float8_e5m2: 1 + 2.0**-3,
    torch.float8_e5m2fnuz: 1 + 2.0**-3,
}
"""Halfway between 1 and the next number of the type; what is added to it decides upwards."""


def numbers_of(dtype: torch.dtype) -> list[float]:
    """The finite magnitudes of a narrow type, in order."""
    bits = torch.arange(1 << (8 * dtype.itemsize - 1))
    whole = torch.int16 if dtype.itemsize == 2 else torch.uint8
    values = bits.to(whole).view(dtype).to(torch.float64)
    return values[values.isfinite()].tolist()


ORDERED = {dtype: numbers_of(dtype) for dtype in NARROW}


def nearest(value: float, dtype: torch.dtype) -> float:
    """The number of a type nearest to a magnitude below its largest one, ties to even."""
    below = 0
    above = len(ORDERED[dtype]) - 1
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if ORDERED[dtype][middle] <= value else (below, middle)
    low, high = ORDERED[dtype][below], ORDERED[dtype][above]
    nearer = (value - low) - (high - value)  # exact, or of the right sign
    if nearer == 0:
        return low if below % 2 == 0 else high
    return low if nearer < 0 else high


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("far", [-30, -40, -52])
def test_a_number_just_above_a_tie(dtype: torch.dtype, far: int, route: str) -> None:
    gradient = torch.tensor([ABOVE_A_TIE[dtype] + 2.0**far], dtype=torch.float64)
    wanted = 2 * ABOVE_A_TIE[dtype] - 1
    for p in (1.0, 2.0, math.inf):
        found = gradclip.get_total_norm([gradient], p, dtype=dtype)
        assert (found.dtype, found.double().item()) == (dtype, wanted)
        clipped = gradclip.clip_([parameter(gradient)], math.inf, p, dtype=dtype)
        assert clipped.double().item() == wanted
        norms = gradclip.grad_norms([parameter(gradient)], p, dtype=dtype)
        assert norms.double().tolist() == [wanted]


@hypothesis.given(
    st.sampled_from(NARROW), st.integers(0, 1 << 15), st.integers(-60, 60), st.floats(0, 1)
)
def test_any_number(dtype: torch.dtype, place: int, far: int, share: float) -> None:
    numbers = ORDERED[dtype]
    place %= len(numbers) - 1
    middle = (numbers[place] + numbers[place + 1]) / 2
    tie = middle + math.copysign(2.0 ** -abs(far), far) * middle
    mixed = numbers[place] + share * (numbers[place + 1] - numbers[place])
    for value in (tie, math.nextafter(middle, 0), math.nextafter(middle, 9e9), middle, mixed):
        if value > numbers[-1]:
            continue
        assert rounding.rounded(value, dtype) == nearest(value, dtype)
        assert rounding.rounded(-value, dtype) == -nearest(value, dtype)
        tensor = torch.tensor([value, -value], dtype=torch.float64)
        narrow = rounding.narrowed(tensor, dtype).double().tolist()
        assert narrow == [nearest(value, dtype), -nearest(value, dtype)]


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan, 1e300, 5e-324, 3.4e38, 65520.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_ends_of_the_range(value: float, dtype: torch.dtype) -> None:
    """Where both ways round alike, torch's own conversion is the judge."""
    want = torch.tensor(value, dtype=torch.float64).to(dtype)
    tensor = torch.tensor(value, dtype=torch.float64)
    assert oracle.same_bits(rounding.tensor_of(value, dtype, torch.device("cpu")), want)
    assert oracle.same_bits(rounding.narrowed(tensor, dtype), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_limits_of_values(dtype: torch.dtype, route: str) -> None:
    limit = ABOVE_A_TIE[dtype] + 2.0**-30
    owner = parameter(torch.tensor([3.0, -3.0, 0.5], dtype=dtype))
    gradclip.clip_grad_value_([owner], limit)
    bound = 2 * ABOVE_A_TIE[dtype] - 1
    assert gradient_of(owner).tolist() == [bound, -bound, 0.5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_total_still_stands_for_its_float64(dtype: torch.dtype, route: str) -> None:
    """Rounded in another way than the total was, the remembered number would count as changed."""
    values = torch.tensor([ABOVE_A_TIE[dtype] + 2.0**-30], dtype=torch.float64)
    norm = gradclip.get_total_norm([values], dtype=dtype)
    owner = parameter(values.clone())
    gradclip.clip_grads_with_norm_([owner], 0.5, norm, eps=0.0)
    assert gradient_of(owner).tolist() == oracle.clipped(values, values.item(), 0.5, 0.0).tolist()
    norm.add_(1.0)
    owner = parameter(values.clone())
    gradclip.clip_grads_with_norm_([owner], 0.5, norm, eps=0.0)
    assert gradient_of(owner).tolist() == [values.item() * (0.5 / norm.double().item())]


@pytest.mark.parametrize("dtype", NARROW)
def test_what_the_kernels_wrote(dtype: torch.dtype) -> None:
    """Without the host's reading it, and again as the float64 behind the total."""
    total = ABOVE_A_TIE[dtype] + 2.0**-30
    written = torch.tensor([total, 1.0, 1.0, 0.0], dtype=torch.float64).view(torch.float32)
    written[6] = total
    found = totals.from_result(written, dtype)
    assert found.double().item() == 2 * ABOVE_A_TIE[dtype] - 1
    remembered = totals.remembered(found)
    assert isinstance(remembered, torch.Tensor)
    assert remembered.item() == total


@pytest.mark.parametrize("compiled", [False, True])
def test_compiled(compiled: bool) -> None:
    gradient = torch.tensor([1 + 2.0**-8 + 2.0**-30], dtype=torch.float64)
    call: Callable[..., torch.Tensor] = gradclip.get_total_norm
    if compiled:
        call = torch.compile(call, backend="eager", fullgraph=True)
    assert call([gradient], dtype=torch.bfloat16).item() == 1.0078125


def test_an_odd_number_keeps_what_was_cut_off() -> None:
    assert _core.to_odd_float32(1 + 2.0**-50) == 1 + 2.0**-23
    assert _core.to_odd_float32(1 - 2.0**-50) == 1 - 2.0**-24
    assert _core.to_odd_float32(1 + 2.0**-23 + 2.0**-50) == 1 + 2.0**-23
    assert _core.to_odd_float32(math.inf) == math.inf
