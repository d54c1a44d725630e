"""NaN and infinite elements, and totals that only look infinite."""

import math
from collections.abc import Sequence

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import gradclip
from tests import oracle
from tests.gradients import REAL_DTYPES, gradient_of, parameters, random_values, total

BAD = [math.nan, math.inf, -math.inf]
MIXED = [[math.inf, -math.inf], [math.inf, math.nan], [1.0, 1.0, math.nan]]
NORMS = [0.0, 1.0, 2.0, 3.0, 1.5, -1.0, math.inf, -math.inf]


def gradients_with(values: Sequence[float], dtype: torch.dtype) -> list[torch.Tensor]:
    """Ordinary gradients with a few elements replaced, the first and the last ones among them."""
    first, second = random_values(4100, dtype, seed=1), random_values(5, dtype, seed=2)
    for place, value in zip((0, 4099, 17), values, strict=False):
        first[place] = value
    return [second, first]


def wanted(values: Sequence[float], gradients: list[torch.Tensor], p: float) -> float:
    if any(map(math.isnan, values)):
        return math.nan
    if p in (0.0, math.inf, -math.inf):
        return oracle.total_norm(gradients, p)
    if p < 0:
        finite = [gradient[gradient.isfinite()] for gradient in gradients]
        return float(oracle.total_norm_to_many_digits(finite, p))
    return math.inf


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("dtype", REAL_DTYPES)
@pytest.mark.parametrize("values", [*([bad] for bad in BAD), *MIXED])
def test_norms(p: float, dtype: torch.dtype, values: list[float], route: str) -> None:
    gradients = gradients_with(values, dtype)
    want = wanted(values, gradients, p)
    assert total(gradients, p) == pytest.approx(want, rel=1e-14, nan_ok=True)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("bad", BAD)
def test_torchs_rules_for_the_gradients(p: float, bad: float, route: str) -> None:
    """A NaN makes all elements NaN; an infinity makes the finite ones 0 and itself NaN."""
    gradients = [torch.tensor([3.0, bad, -1.0]), torch.tensor([2.0])]
    owners, theirs = (parameters(gradient.clone() for gradient in gradients) for _ in range(2))
    norm = gradclip.clip_(owners, 1.0, p)
    want = torch.nn.utils.clip_grad_norm_(theirs, 1.0, p)
    assert torch.equal(norm.nan_to_num(7.0), want.nan_to_num(7.0))
    for owner, other in zip(owners, theirs, strict=True):
        assert torch.equal(gradient_of(owner).nan_to_num(7.0), gradient_of(other).nan_to_num(7.0))
        assert gradient_of(owner).isnan().all() or not math.isnan(bad)


@pytest.mark.parametrize("dtype", [*REAL_DTYPES, torch.complex64])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("p", [2.0, math.inf])
def test_the_error_comes_before_any_write(
    dtype: torch.dtype, bad: float, p: float, route: str
) -> None:
    gradients = [torch.tensor([3.0, bad]).to(dtype), torch.ones(3, dtype=dtype)]
    owners = parameters(gradient.clone() for gradient in gradients)
    with pytest.raises(RuntimeError, match=r"total norm of order .* is non-finite"):
        gradclip.clip_grad_norm_(owners, 1.0, p, error_if_nonfinite=True)
    with pytest.raises(RuntimeError, match="error_if_nonfinite=False"):
        gradclip.get_total_norm(map(gradient_of, owners), p, error_if_nonfinite=True)
    assert all(
        oracle.same_bits(gradient_of(owner), gradient)
        for owner, gradient in zip(owners, gradients, strict=True)
    )


@pytest.mark.parametrize("bad", BAD)
def test_the_error_names_the_gradient(bad: float, route: str) -> None:
    good, wrong = parameters([torch.ones(3), torch.tensor([3.0, bad])])
    kind = "NaN" if math.isnan(bad) else "infinite"
    holds = rf"holds 1 {kind} of 2 elements\. To"
    with pytest.raises(RuntimeError, match=f"clipped: the gradient of `b.weight` {holds}"):
        gradclip.clip_([("a", good), ("b.weight", wrong)], 1.0, error_if_nonfinite=True)
    with pytest.raises(RuntimeError, match=f"clipped: the gradient of parameter 1 {holds}"):
        gradclip.get_total_norm(map(gradient_of, (good, wrong)), error_if_nonfinite=True)


def described(gradients: Sequence[torch.Tensor]) -> str:
    """What the error must say, by torch's own predicates."""
    nan = [gradient.isnan() for gradient in gradients]
    infinite = [each.isinf() & ~is_nan for each, is_nan in zip(gradients, nan, strict=True)]
    held = []
    for index, counted in enumerate(zip(nan, infinite, strict=True)):
        counts = zip([int(each.sum()) for each in counted], ("NaN", "infinite"), strict=True)
        if kinds := " and ".join(f"{count} {kind}" for count, kind in counts if count):
            held.append(f"`g{index}` holds {kinds} of {gradients[index].numel()} elements")
    if len(held) == 1:
        return f"the gradient of {held[0]}"
    more = f", and {len(held) - 3} more" if len(held) > 3 else ""
    named = ", ".join(held[:3])
    return f"{len(held)} of {len(gradients)} gradients are not finite: {named}{more}"


@hypothesis.given(
    st.lists(
        st.tuples(
            st.sampled_from([*REAL_DTYPES, torch.complex64, torch.complex128]),
            st.lists(st.sampled_from([0.0, 1.0, -2.0, *BAD]), min_size=1, max_size=9),
            st.integers(1, 700),
        ),
        min_size=1,
        max_size=6,
    )
)
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_every_gradient_that_is_not_finite_is_counted(
    route: str, drawn: list[tuple[torch.dtype, list[float], int]]
) -> None:
    gradients = [torch.tensor(some).repeat(times).to(dtype) for dtype, some, times in drawn]
    hypothesis.assume(not all(gradient.isfinite().all() for gradient in gradients))
    owners = parameters(gradient.clone() for gradient in gradients)
    named = [(f"g{index}", owner) for index, owner in enumerate(owners)]
    with pytest.raises(RuntimeError) as error:
        gradclip.clip_(named, 1.0, error_if_nonfinite=True)
    assert f"so it cannot be clipped: {described(gradients)}. To disable" in str(error.value)
    for owner, gradient in zip(owners, gradients, strict=True):
        assert oracle.same_bits(gradient_of(owner), gradient)


@pytest.mark.parametrize("layout", ["expanded", "rows", "sparse"])
def test_elements_are_counted_in_any_layout(layout: str, route: str) -> None:
    values = torch.tensor([1.0, math.nan, -math.inf, math.inf, 0.0, math.nan])
    made = {
        "expanded": values[:, None].expand(6, 5),
        "rows": values.repeat(5, 2).t()[1::2],
        "sparse": torch.stack([values, torch.zeros(6)]).to_sparse(),
    }[layout]
    dense = made.to_dense()
    (owner,) = parameters([made])
    counts = f"{int(dense.isnan().sum())} NaN and {int(dense.isinf().sum())} infinite"
    with pytest.raises(RuntimeError, match=f"holds {counts} of {dense.numel()} elements"):
        gradclip.clip_([owner], 1.0, error_if_nonfinite=True)


def test_no_gradient_is_blamed_for_a_sum_that_is_too_large(route: str) -> None:
    owner = parameters([torch.full((4,), 1e308, dtype=torch.float64)])
    with pytest.raises(RuntimeError, match=r"cannot be clipped\. To disable"):
        gradclip.clip_(owner, 1.0, 1.0, error_if_nonfinite=True)


def test_a_good_step_after_a_bad_one() -> None:
    owners = parameters([torch.tensor([3.0, math.nan]), torch.tensor([1.0])])
    assert math.isnan(gradclip.clip_(owners, 1.0))
    owners[0].grad, owners[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    for _ in range(3):
        assert gradclip.clip_(owners, 5.0, eps=0.0).item() == 5.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_infinite_limit_never_changes_a_gradient(bad: float, route: str) -> None:
    gradient = torch.tensor([1.0, bad, -3.0])
    (owner,) = parameters([gradient.clone()])
    norm = gradclip.clip_([owner], math.inf)
    assert torch.equal(norm, torch.tensor(bad)) or (norm.isnan() and math.isnan(bad))
    assert oracle.same_bits(gradient_of(owner), gradient)


@pytest.mark.parametrize(
    ("dtype", "values", "want"),
    [
        (torch.float32, [3e20, 4e20], 5e20),
        (torch.float16, [60000.0, 60000.0], 60000 * math.sqrt(2)),
        (torch.float64, [3e200, 4e200], 5e200),
        (torch.float64, [3e-200, 4e-200], 5e-200),
        (torch.bfloat16, [3e38, 3e38], 3e38 * math.sqrt(2)),
    ],
)
def test_no_false_alarm_where_only_squares_leave_the_range(
    dtype: torch.dtype, values: list[float], want: float, route: str
) -> None:
    (owner,) = parameters([torch.tensor(values, dtype=dtype)])
    norm = gradclip.clip_([owner], 1.0, error_if_nonfinite=True, dtype=torch.float64)
    assert norm.item() == pytest.approx(want, rel=1e-2)
    clipped = gradient_of(owner).double().norm().item()
    assert clipped == pytest.approx(min(1.0, want), rel=1e-2)


@pytest.mark.parametrize("total_norm", [math.nan, torch.tensor(math.nan)])
def test_a_nan_total_makes_every_gradient_nan(total_norm: float | torch.Tensor, route: str) -> None:
    owners = parameters([torch.ones(3), torch.zeros(2, dtype=torch.bfloat16)])
    gradclip.clip_grads_with_norm_(owners, 1.0, total_norm)
    assert all(gradient_of(owner).isnan().all() for owner in owners)


@pytest.mark.parametrize("limit", [0.0, 1.0, math.inf])
def test_zero_gradients_stay_zero(limit: float, route: str) -> None:
    (owner,) = parameters([torch.zeros(4)])
    for eps in (1e-6, 0.0):
        assert gradclip.clip_([owner], limit, eps=eps).item() == 0.0
        assert gradient_of(owner).tolist() == [0.0] * 4


@pytest.mark.parametrize("p", [-1.0, -0.5])
def test_a_zero_element_decides_negative_norms(p: float, route: str) -> None:
    assert total([torch.tensor([3.0, 0.0, math.inf])], p) == 0.0
    assert total([torch.tensor([math.inf])], p) == math.inf
    assert oracle.ulps_apart(total([torch.tensor([math.inf, 2.0])], p), 2.0) <= 4


def test_non_finite_complex_numbers(route: str) -> None:
    for z, want in (
        (complex(math.nan, 1), math.nan),
        (complex(1, -math.inf), math.inf),
        (complex(math.inf, math.nan), math.nan),
    ):
        for p in (1.0, 2.0, 3.0, math.inf):
            gradient = torch.tensor([z, 1 + 1j], dtype=torch.complex64)
            assert total([gradient], p) == pytest.approx(want, nan_ok=True)
