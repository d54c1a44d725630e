"""The reference path against the oracle, and its sums against the engine's, limb by limb."""

import math
import tracemalloc
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from gradclip import _core, reference
from gradclip.reference import limbs, slices
from tests import oracle
from tests.gradients import FULL_SPREAD, REAL_DTYPES, random_values

COMPLEX_DTYPES = [torch.complex64, torch.complex128]
NORMS = [0.0, 1.0, 2.0, 3.0, 4.0, 7.0, 100.0, math.inf, -math.inf]
ONE = torch.tensor(1.0, dtype=torch.float64)


def engine_sums(gradient: torch.Tensor, p: float) -> list[int]:
    return _core.Gradients.from_tensors([gradient]).sums(p, 1).to_list()


def exact(vector: torch.Tensor) -> Fraction:
    """The number that the limbs stand for."""
    places = enumerate(vector[: limbs.LIMBS].tolist())
    return sum(
        (Fraction(limb) * Fraction(2) ** (32 * j + limbs.BASE) for j, limb in places), Fraction(0)
    )


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("dtype", [*REAL_DTYPES, *COMPLEX_DTYPES])
@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_the_engines_sums(p: float, dtype: torch.dtype, share: float) -> None:
    gradient = random_values(4099, dtype, spread=int(share * FULL_SPREAD[dtype]), seed=8)
    assert reference.sums(gradient, p).tolist() == engine_sums(gradient, p)


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("dtype", REAL_DTYPES)
def test_the_engines_sums_of_non_finite_elements(p: float, dtype: torch.dtype) -> None:
    special = [math.nan, math.inf, -math.inf, 0.0, -0.0, 2.0, -math.inf, -3.0]
    gradient = torch.tensor(special, dtype=dtype).repeat(5)
    assert reference.sums(gradient, p).tolist() == engine_sums(gradient, p)


@pytest.mark.parametrize("p", NORMS)
def test_every_nan_is_a_nan(p: float) -> None:
    payloads = torch.tensor([1, 1 << 51, (1 << 52) - 1, 1 - (1 << 63)]) | 0x7FF << 52
    gradient = payloads.view(torch.float64)
    assert gradient.isnan().all()
    sums = reference.sums(gradient, p).tolist()
    assert sums == engine_sums(gradient, p)
    assert sums[limbs.NAN : limbs.NEGATIVE_INFINITY + 1] == [4, 0, 0]


@pytest.mark.parametrize("p", [-1.0, -2.5, 0.5, 1.5])
def test_counts_of_other_norms(p: float) -> None:
    gradient = torch.tensor([0.0, 1.0, math.nan, math.inf, 1e-320, 1e300, 0.0], dtype=torch.float64)
    ours, engines = reference.sums(gradient, p).tolist(), engine_sums(gradient, p)
    assert ours[limbs.NAN :] == engines[limbs.NAN :]


@pytest.mark.parametrize("scale_exponent", [-1000, -500, -1, 1, 300, 1023])
@pytest.mark.parametrize("p", [3.0, 4.0, 100.0])
def test_scaled_terms(scale_exponent: int, p: float) -> None:
    """Terms of |x| over a power of two are those of the divided numbers."""
    near_one = torch.frexp(random_values(500, torch.float64, seed=3)).mantissa
    far = torch.ldexp(near_one, torch.tensor(scale_exponent))
    scaled = reference.sums(far, p, scale_exponent=scale_exponent)
    assert exact(scaled) == exact(reference.sums(near_one, p)) > 0
    assert scaled[limbs.MISFITS] == 0


def test_misfits_ask_for_another_pass() -> None:
    gradient = torch.tensor([1e-200, 1.0, 1e200], dtype=torch.float64)
    assert reference.sums(gradient, 3.0)[limbs.MISFITS] == 2
    assert reference.sums(gradient, 2.0)[limbs.MISFITS] == 0
    assert reference.sums(gradient, 3.0, scale_exponent=664)[limbs.MISFITS] == 0
    assert reference.sums(gradient, 3.0, divisor=1e200)[limbs.MISFITS] == 0


def test_a_divisor_divides() -> None:
    gradient = torch.tensor([3.0, 6.0], dtype=torch.float64)
    assert exact(reference.sums(gradient, 3.0, divisor=3.0)) == 1 + 8


@hypothesis.given(
    st.lists(st.integers(1, 5), min_size=0, max_size=4),
    st.randoms(use_true_random=False),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_owned_ranges_of_any_layout(shape: list[int], random, a: float, b: float) -> None:  # type: ignore[no-untyped-def]
    gradient = torch.arange(1.0, math.prod(shape) + 1).reshape(shape)
    if shape:
        order = random.sample(range(len(shape)), len(shape))
        gradient = gradient.permute(order)
        if random.random() < 0.5:
            gradient = gradient[..., :1].expand(gradient.shape)
    start, stop = sorted(int(share * gradient.numel()) for share in (a, b))
    want = reference.sums(gradient.flatten()[start:stop].clone(), 2.0)
    assert reference.sums(gradient, 2.0, owned=(start, stop)).tolist() == want.tolist()


@hypothesis.given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 40))
def test_slices_cover_a_tensor_once(shape: list[int], limit: int) -> None:
    tensor = torch.zeros(shape, dtype=torch.int64).transpose(0, -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "SLICE_ELEMENTS", limit)
        for piece in slices.slices(tensor):
            assert 0 < piece.numel() <= limit
            piece += 1
    assert (tensor == 1).all()


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 2**54 - 1), st.integers(limbs.BASE, 1900)), max_size=50),
    st.integers(1, 2**62),
)
def test_limbs_hold_integers_exactly(terms: list[tuple[int, int]], weight: int) -> None:
    vector = limbs.empty(torch.ones(1))
    wholes, exponents = (
        torch.tensor([term[i] for term in terms], dtype=torch.int64) for i in (0, 1)
    )
    limbs.deposit(vector, wholes, exponents)
    want = sum(
        (Fraction(whole) * Fraction(2) ** exponent for whole, exponent in terms), Fraction(0)
    )
    assert exact(vector) == want
    limbs.carry(vector)
    assert exact(vector) == want
    assert ((vector[:135] >= 0) & (vector[:135] < 2**32)).all()
    limbs.multiply(vector, weight)
    assert exact(vector) == want * weight


def test_carries_run_through_limbs_of_ones() -> None:
    vector = limbs.empty(torch.ones(1))
    vector[3:90] = 2**32 - 1
    vector[2] = 2**33
    limbs.carry(vector)
    assert vector[2:92].tolist() == [0, 1, *[0] * 86, 1, 0]
    vector = limbs.empty(torch.ones(1))
    vector[:135] = 2**62
    want = exact(vector)
    limbs.carry(vector)
    assert exact(vector) == want


@pytest.mark.parametrize("dtype", [*REAL_DTYPES, *COMPLEX_DTYPES])
@pytest.mark.parametrize("factor", [0.3, 0.0, 1.0, 3.0, math.nan, 1 - 2.0**-40])
def test_scaling_has_the_oracles_bits(dtype: torch.dtype, factor: float) -> None:
    for gradient in (
        random_values((5, 7), dtype, spread=6, seed=2),
        torch.tensor([1.0]).to(dtype)[0],
    ):
        view = torch.stack([gradient, gradient], dim=-1)[..., 1]
        reference.scale_(view, factor * ONE)
        want = oracle.scaled(gradient, factor)
        assert oracle.same_bits(view, want) or math.isnan(factor)
        assert view.isnan().all() == math.isnan(factor)


def test_a_factor_of_one_keeps_signalling_nans() -> None:
    bits = torch.tensor([0x7F800001, 0x3F800000], dtype=torch.int32)
    gradient = bits.clone().view(torch.float32)
    reference.scale_(gradient, ONE)
    assert torch.equal(gradient.view(torch.int32), bits)


def test_the_factor_is_never_read_by_the_host() -> None:
    """A meta factor has no value to read: everything up to the write must do without."""
    gradient = torch.ones(3, device="meta")
    reference.scale_(gradient, torch.ones((), dtype=torch.float64, device="meta"))
    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(3)
        reference.scale_(fake, torch.ones((), dtype=torch.float64))
        assert reference.sums(fake, 2.0).shape == (limbs.SUMS_LENGTH,)


def test_clamping_has_torchs_bits() -> None:
    for dtype in REAL_DTYPES:
        gradient = random_values((6, 50), dtype, spread=3, seed=1)
        gradient[0, :3] = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype)
        view, want = gradient.clone()[:, ::3], gradient[:, ::3].clamp(-0.7, 0.7)
        reference.clamp_(view, 0.7)
        assert oracle.same_bits(view, want)
    beyond = torch.tensor([math.inf, -65504.0], dtype=torch.float16)
    reference.clamp_(beyond, 1e6)
    assert beyond.tolist() == [math.inf, -65504.0]


def test_meta_tensors_have_meta_sums() -> None:
    sums = reference.sums(torch.ones(3, device="meta"), 2.0)
    assert (sums.device.type, sums.dtype, sums.shape) == ("meta", torch.int64, (144,))


def test_python_memory_stays_small() -> None:
    gradient = torch.ones(1 << 21)
    reference.sums(gradient, 2.0)
    tracemalloc.start()
    try:
        reference.sums(gradient, 2.0)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
