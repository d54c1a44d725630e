"""torch's own expectations of clipping, asked of torch's functions and of gradclip's alike.

Each test here runs twice. Where the two differ by intent, `DIFFERENCES` says how, and a test holds
both sides to it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import utils

import gradclip
from tests.gradients import gradient_of, parameters, random_values

LIBRARIES: dict[str, Any] = {"torch": utils, "gradclip": gradclip}
FOREACH = [None, True, False]
NORM_TYPES: list[Any] = [0.5, 1.0, 1.5, 2.0, 4.0, math.inf, "inf", "2"]
EPS = 1e-6

Owners = list[torch.nn.Parameter]


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Any:
    return LIBRARIES[request.param]


def slope_and_constant() -> list[torch.Tensor]:
    """A matrix whose elements grow, and a vector of small equal ones."""
    return [torch.arange(1.0, 101.0).view(10, 10), torch.ones(10) / 1000]


def norm_of(gradients: Sequence[torch.Tensor], p: Any) -> float:
    """In float64 and plain arithmetic."""
    flat = torch.cat([gradient.double().flatten() for gradient in gradients])
    magnitudes: list[float] = flat.abs().tolist()
    p = float(p)
    if math.isinf(p):
        return max(magnitudes)
    return float(math.fsum(x**p for x in magnitudes) ** (1 / p))


def ratios(before: Sequence[torch.Tensor], owners: Owners) -> torch.Tensor:
    """What every element was multiplied by."""
    pairs = zip(before, owners, strict=True)
    return torch.cat([(gradient_of(o).double() / g.double()).flatten() for g, o in pairs])


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("p", NORM_TYPES)
def test_all_gradients_shrink_by_one_factor_to_the_limit(
    library: Any, p: Any, foreach: bool | None
) -> None:
    before, owners = slope_and_constant(), parameters(slope_and_constant())
    norm = library.clip_grad_norm_(owners, 2.0, norm_type=p, foreach=foreach)
    assert norm.item() == pytest.approx(norm_of(before, p), rel=1e-5)
    after = [gradient_of(owner) for owner in owners]
    assert norm_of(after, p) == pytest.approx(2.0, rel=1e-5)
    factors = ratios(before, owners)
    assert factors.max().item() == pytest.approx(2.0 / (norm_of(before, p) + EPS), rel=1e-5)
    assert factors.min().item() == pytest.approx(factors.max().item(), rel=1e-5)


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("p", NORM_TYPES)
def test_small_gradients_stay(library: Any, p: Any, foreach: bool | None) -> None:
    before = [torch.rand(10, 10) / 10_000, torch.ones(10) / 500]
    owners = parameters(gradient.clone() for gradient in before)
    limit = 2 * norm_of(before, p)
    norm = library.clip_grad_norm_(owners, limit, norm_type=p, foreach=foreach)
    assert norm.item() == pytest.approx(norm_of(before, p), rel=1e-5)
    for owner, gradient in zip(owners, before, strict=True):
        assert torch.equal(gradient_of(owner), gradient)


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("p", NORM_TYPES)
def test_one_tensor_is_a_list_of_one(library: Any, p: Any, foreach: bool | None) -> None:
    (alone,), (listed,) = (parameters([torch.arange(1.0, 11.0)]) for _ in range(2))
    norms = [
        library.clip_grad_norm_(form, 1.0, norm_type=p, foreach=foreach)
        for form in (alone, [listed])
    ]
    assert torch.equal(*norms)
    assert torch.equal(gradient_of(alone), gradient_of(listed))


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_gradients_on_two_devices(library: Any, p: float, foreach: bool | None) -> None:
    """The CPU twice, by its two names; torch groups by device and by dtype."""
    devices = [torch.device("cpu"), torch.device("cpu", 0)]
    before = [torch.arange(1.0, 5.0, device=devices[0]), torch.ones(3, device=devices[1])]
    owners = parameters(gradient.clone() for gradient in before)
    norm = library.clip_grad_norm_(owners, 0.5, norm_type=p, foreach=foreach)
    assert norm.item() == pytest.approx(norm_of(before, p), rel=1e-6)
    assert norm_of([gradient_of(owner) for owner in owners], p) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_gradients_of_several_dtypes(library: Any, p: float, foreach: bool | None) -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    before = [random_values(9, dtype, seed=seed) for seed, dtype in enumerate(dtypes)]
    owners = parameters(gradient.clone() for gradient in before)
    norm = library.clip_grad_norm_(owners, 0.25, norm_type=p, foreach=foreach)
    assert norm.dtype == torch.float64
    assert norm.item() == pytest.approx(norm_of(before, p), rel=4e-3)
    for owner, gradient in zip(owners, before, strict=True):
        assert gradient_of(owner).dtype == gradient.dtype
        want = gradient.double() * (0.25 / (norm.item() + EPS))
        assert torch.allclose(gradient_of(owner).double(), want, rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("p", NORM_TYPES)
def test_norm_and_scale_make_a_clip(library: Any, p: Any, foreach: bool | None) -> None:
    two, one = (parameters(slope_and_constant()) for _ in range(2))
    raw = [gradient_of(owner) for owner in two]
    norm = library.get_total_norm(raw, norm_type=p, foreach=foreach)
    library.clip_grads_with_norm_(two, 2.0, norm, foreach=foreach)
    assert torch.equal(norm, library.clip_grad_norm_(one, 2.0, norm_type=p, foreach=foreach))
    for ours, other in zip(two, one, strict=True):
        assert torch.equal(gradient_of(ours), gradient_of(other))


@pytest.mark.parametrize("foreach", FOREACH)
def test_the_norm_of_tensors_without_a_list(library: Any, foreach: bool | None) -> None:
    tensor = torch.tensor([3.0, 4.0])
    assert library.get_total_norm(tensor, foreach=foreach).item() == 5.0
    assert library.get_total_norm((t for t in [tensor]), foreach=foreach).item() == 5.0
    assert library.get_total_norm([], foreach=foreach).item() == 0.0
    assert torch.equal(tensor, torch.tensor([3.0, 4.0]))


@pytest.mark.parametrize("foreach", FOREACH)
def test_the_scale_of_another_total(library: Any, foreach: bool | None) -> None:
    """The total is the caller's: clipping to 2 by a norm of 8 divides by four."""
    owners = parameters([torch.tensor([4.0, -8.0]), torch.ones(2)])
    library.clip_grads_with_norm_(owners, 2.0, torch.tensor(8.0), foreach=foreach)
    assert gradient_of(owners[0]).tolist() == pytest.approx([1.0, -2.0])
    assert gradient_of(owners[1]).tolist() == pytest.approx([0.25, 0.25])


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("limit", [2.5, 0.0, math.inf, "2.5", torch.tensor(2.5)])
def test_values_are_limited(library: Any, limit: Any, foreach: bool | None) -> None:
    before = [torch.arange(-50.0, 50.0).view(10, 10) / 5, torch.ones(10) * 2]
    owners = parameters(gradient.clone() for gradient in before)
    unused = torch.nn.Parameter(torch.ones(3))
    library.clip_grad_value_([*owners, unused], limit, foreach=foreach)
    for owner, gradient in zip(owners, before, strict=True):
        want = gradient.clamp(-float(limit), float(limit))
        assert torch.equal(gradient_of(owner), want)
    assert unused.grad is None


@pytest.mark.parametrize("foreach", FOREACH)
def test_values_of_a_generator_and_of_one_tensor(library: Any, foreach: bool | None) -> None:
    (owner,) = parameters([torch.tensor([-3.0, 0.5])])
    library.clip_grad_value_((o for o in [owner]), 2.0, foreach=foreach)
    assert gradient_of(owner).tolist() == [-2.0, 0.5]
    library.clip_grad_value_(owner, 0.25, foreach=foreach)
    assert gradient_of(owner).tolist() == [-0.25, 0.25]


NON_FINITE = {
    "NaN": [math.nan, 1.0],
    "infinity": [math.inf, 1.0],
    "minus infinity": [-math.inf, 1.0],
    "NaN beside infinity": [math.nan, math.inf],
    "finite": [2.0, -1.0],
}
POSITIVE, NEGATIVE = [0.1, 1.0, 2.0, 3.5, math.inf], [-0.1, -1.0, -2.0, -3.5, -math.inf]


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("p", [*POSITIVE, *NEGATIVE])
@pytest.mark.parametrize("kind", NON_FINITE)
def test_totals_that_are_not_finite(
    library: Any, kind: str, p: float, foreach: bool | None
) -> None:
    """A negative power makes an infinity vanish; every other total raises when it must not be."""
    elements = NON_FINITE[kind]
    is_bad = "NaN" in kind or ("infinity" in kind and p > 0)
    for others in ([], [torch.ones(3)]):
        owners = parameters([torch.tensor(elements), *others])
        before = [gradient_of(owner).clone() for owner in owners]
        if is_bad:
            with pytest.raises(RuntimeError, match=f"total norm of order {p} for gradients"):
                library.clip_grad_norm_(owners, 1.0, p, error_if_nonfinite=True, foreach=foreach)
            with pytest.raises(RuntimeError, match=f"total norm of order {p} for gradients"):
                library.get_total_norm(before, p, error_if_nonfinite=True, foreach=foreach)
            for owner, gradient in zip(owners, before, strict=True):
                assert torch.equal(gradient_of(owner).nan_to_num(7.0), gradient.nan_to_num(7.0))
            norm = library.clip_grad_norm_(owners, 1.0, p, foreach=foreach)
            assert norm.isnan().item() == ("NaN" in kind)
            assert not norm.isfinite().item()
        else:
            norm = library.clip_grad_norm_(owners, 1.0, p, True, foreach)
            assert norm.isfinite().item()


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("elements", [[math.nan, 1.0], [math.inf, 1.0], [2.0, -math.inf]])
def test_gradients_after_a_total_that_is_not_finite(
    library: Any, elements: list[float], foreach: bool | None
) -> None:
    owners = parameters([torch.tensor(elements), torch.ones(3)])
    library.clip_grad_norm_(owners, 1.0, foreach=foreach)
    spoiled, beside = (gradient_of(owner) for owner in owners)
    if math.nan in elements:
        assert spoiled.isnan().all()
        assert beside.isnan().all()
    else:
        assert spoiled.isnan().tolist() == [math.isinf(x) for x in elements]
        assert beside.tolist() == [0.0, 0.0, 0.0]


class Difference(NamedTuple):
    """A call to which the two libraries answer differently: a value, or an error and its words."""

    reason: str
    call: Callable[[Any], Any]
    torch: Any
    gradclip: Any


def clipped(library: Any, gradients: list[torch.Tensor], *arguments: Any) -> list[float]:
    """The total norm, and the first element of each gradient after the clip."""
    owners = parameters(gradients)
    norm = library.clip_grad_norm_(owners, *arguments)
    return [norm.item(), *(gradient_of(owner).flatten()[0].item() for owner in owners)]


def value_clipped(library: Any, gradients: list[torch.Tensor], limit: float) -> list[float]:
    owners = parameters(gradients)
    library.clip_grad_value_(owners, limit)
    return [gradient_of(owner).flatten()[0].item() for owner in owners]


def scaled_by_a_number(library: Any) -> list[float]:
    owners = parameters([torch.tensor([8.0])])
    library.clip_grads_with_norm_(owners, 2.0, 8.0, **({"eps": 0.0} if library is gradclip else {}))
    return list(gradient_of(owners[0]).tolist())


def twice(library: Any) -> list[float]:
    (owner,) = parameters([torch.tensor([3.0, 4.0])])
    norm = library.clip_grad_norm_([owner, owner], 1e3)
    return [round(norm.item(), 3)]


def of_a_module(library: Any) -> float:
    module = torch.nn.Linear(2, 1, bias=False)
    module.weight.grad = torch.tensor([[3.0, 4.0]])
    return float(library.clip_grad_norm_(module, 1.0).item())


DIFFERENCES: dict[str, Difference] = {
    "p = 0": Difference(
        "torch counts tensors that hold a non-zero element, gradclip the elements",
        lambda library: library.get_total_norm(
            [torch.tensor([3.0, 0.0, 4.0]), torch.ones(2)], 0.0
        ).item(),
        2.0,
        4.0,
    ),
    "p = 0 and NaN": Difference(
        "a NaN makes every norm NaN; torch counts it",
        lambda library: library.get_total_norm([torch.tensor([math.nan, 0.0])], 0.0).item(),
        1.0,
        math.nan,
    ),
    "squares that overflow": Difference(
        "the sum is exact, so only a total too large for its type is infinite",
        lambda library: clipped(library, [torch.full((4,), 2.0**100)], 2.0**50),
        [math.inf, 0.0],
        [2.0**101, 2.0**49],
    ),
    "squares that overflow, float64": Difference(
        "the same",
        lambda library: clipped(
            library, [torch.full((4,), 2.0**600, dtype=torch.float64)], 2.0**50
        ),
        [math.inf, 0.0],
        [2.0**601, 2.0**49],
    ),
    "squares that vanish": Difference(
        "the sum is exact, so nothing underflows",
        lambda library: library.get_total_norm([torch.full((4,), 2.0**-100)]).item(),
        0.0,
        2.0**-99,
    ),
    "float16 totals": Difference(
        "the total of narrow gradients is float32",
        lambda library: library.get_total_norm([torch.full((4,), 4e4, dtype=torch.float16)]).item(),
        math.inf,
        8e4,
    ),
    "a parameter listed twice": Difference(
        "one gradient counts once", twice, [round(math.sqrt(50), 3)], [5.0]
    ),
    "a negative limit": Difference(
        "torch reverses the gradients",
        lambda library: [round(x, 4) for x in clipped(library, [torch.tensor([3.0, 4.0])], -1.0)],
        [5.0, -0.6],
        (ValueError, "`max_norm` is -1.0"),
    ),
    "no limit, an infinite gradient": Difference(
        "a limit of inf changes nothing",
        lambda library: clipped(library, [torch.tensor([2.0, math.inf])], math.inf),
        [math.inf, math.nan],
        [math.inf, 2.0],
    ),
    "norm_type NaN": Difference(
        "there is no such norm",
        lambda library: library.get_total_norm([torch.ones(2)], math.nan).item(),
        math.nan,
        (ValueError, "`norm_type` is nan"),
    ),
    "the largest magnitude beside an empty tensor": Difference(
        "an empty tensor has no element to count",
        lambda library: library.get_total_norm([torch.zeros(0), torch.ones(2)], math.inf).item(),
        (RuntimeError, "empty tensor"),
        1.0,
    ),
    "a number as total_norm": Difference(
        "a number is a norm", scaled_by_a_number, (TypeError, "clamp"), [2.0]
    ),
    "values of no gradient": Difference(
        "there is nothing to limit",
        lambda library: value_clipped(library, [], 1.0),
        (RuntimeError, "nested_tensorlist"),
        [],
    ),
    "a negative limit of values": Difference(
        "torch sets every element to the negative limit",
        lambda library: value_clipped(library, [torch.tensor([3.0])], -1.0),
        [-1.0],
        (ValueError, "`clip_value` is -1.0"),
    ),
    "a Module": Difference("its parameters are meant", of_a_module, (TypeError, "iterable"), 5.0),
    "float8": Difference(
        "every floating type has a norm",
        lambda library: library.get_total_norm(
            [torch.tensor([3.0, 4.0]).to(torch.float8_e5m2)]
        ).item(),
        (NotImplementedError, "not implemented"),
        5.0,
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_as_written(library: Any, name: str) -> None:
    difference = DIFFERENCES[name]
    expected = difference.torch if library is utils else difference.gradclip
    if isinstance(expected, tuple):
        kind, words = expected
        with pytest.raises(kind, match=words):
            difference.call(library)
    else:
        assert difference.call(library) == pytest.approx(expected, rel=1e-4, nan_ok=True)


def test_every_difference_is_one() -> None:
    for difference in DIFFERENCES.values():
        assert difference.reason
        assert repr(difference.torch) != repr(difference.gradclip)
