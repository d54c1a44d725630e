"""The same call gives what `torch.nn.utils` gives, wherever torch's own answer is right."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import utils

import gradclip
from tests.gradients import gradient_of, parameters, random_values

NAMES = ["clip_grad_norm_", "get_total_norm", "clip_grads_with_norm_", "clip_grad_value_"]

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}
"""torch sums and scales in the gradients' own type: these are a few of its units."""


def model_gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    shapes: list[tuple[int, ...]] = [(33, 17), (17,), (4, 3, 5, 2), (), (0, 7), (1025,)]
    return [random_values(shape, dtype, seed=seed) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize("name", NAMES)
def test_parameters_have_torchs_names_order_and_defaults(name: str) -> None:
    ours: list[Any] = list(inspect.signature(getattr(gradclip, name)).parameters.values())
    for parameter in inspect.signature(getattr(utils, name)).parameters.values():
        mine = ours.pop(0)
        assert (mine.name, mine.default, mine.kind) == (
            parameter.name,
            parameter.default,
            parameter.kind,
        )
    extra = {parameter.kind for parameter in ours}
    assert extra <= {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 1.5, math.inf, "inf"])
@pytest.mark.parametrize("max_norm", [0.75, 1e6])
def test_clip_grad_norm(dtype: torch.dtype, p: float | str, max_norm: float, route: str) -> None:
    # torch has no largest magnitude of an empty tensor
    gradients = [g for g in model_gradients(dtype) if g.numel() or float(p) != math.inf]
    ours, theirs = (parameters(g.clone() for g in gradients) for _ in range(2))
    norm = gradclip.clip_grad_norm_(ours, max_norm, p)  # type: ignore[arg-type]
    want = utils.clip_grad_norm_(theirs, max_norm, p)  # type: ignore[arg-type]
    assert float(norm) == pytest.approx(float(want), rel=TOLERANCE[dtype])
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            gradient_of(mine), gradient_of(other), rtol=TOLERANCE[dtype], atol=1e-7
        )
    changed = [not torch.equal(gradient_of(m), g) for m, g in zip(ours, gradients, strict=True)]
    assert any(changed) == (max_norm == 0.75)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_norm_then_scale_as_two_calls(p: float, route: str) -> None:
    gradients = model_gradients(torch.float32)[:2]
    ours, theirs = (parameters(g.clone() for g in gradients) for _ in range(2))
    norm = gradclip.get_total_norm([gradient_of(q) for q in ours], p)
    assert float(norm) == pytest.approx(float(utils.get_total_norm(gradients, p)), rel=1e-6)
    gradclip.clip_grads_with_norm_(ours, 0.5, norm)
    utils.clip_grads_with_norm_(theirs, 0.5, norm)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient_of(mine), gradient_of(other), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_clip_grad_value_gives_torchs_bits(dtype: torch.dtype, route: str) -> None:
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.3, -0.3, 0.0, -0.0], dtype=dtype)
    gradients = [*model_gradients(dtype), special]
    ours, theirs = (parameters(g.clone() for g in gradients) for _ in range(2))
    gradclip.clip_grad_value_(ours, 0.3)
    utils.clip_grad_value_(theirs, 0.3)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            gradient_of(mine), gradient_of(other), rtol=0, atol=0, equal_nan=True
        )


CONTAINERS: list[Callable[[list[torch.nn.Parameter]], Any]] = [
    list,
    tuple,
    iter,
    lambda owners: (owner for owner in owners),
    lambda owners: dict(enumerate(owners)).values(),
]


@pytest.mark.parametrize("container", CONTAINERS)
def test_any_iterable_is_walked_once(container: Callable[..., Any], route: str) -> None:
    owners = parameters([torch.tensor([3.0, 0.0]), torch.tensor([4.0])])
    assert gradclip.clip_grad_norm_(container(owners), 2.5).item() == 5.0
    assert [gradient_of(owner).tolist() for owner in owners] == [
        [pytest.approx(1.5), 0.0],
        [pytest.approx(2.0)],
    ]


@pytest.mark.parametrize("foreach", [None, True, False])
def test_foreach_is_accepted_and_changes_nothing(foreach: bool | None) -> None:
    with_it, without = (parameters([torch.tensor([3.0, 4.0])]) for _ in range(2))
    norm = gradclip.clip_grad_norm_(with_it, 1.0, 2.0, False, foreach)
    assert norm.item() == gradclip.clip_grad_norm_(without, 1.0).item() == 5.0
    assert torch.equal(gradient_of(with_it[0]), gradient_of(without[0]))
    assert gradient_of(without[0]).tolist() == pytest.approx([0.6, 0.8])


def test_result_is_a_plain_tensor_without_history() -> None:
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    (weight**2).sum().backward()
    norm = gradclip.clip_grad_norm_([weight], 1.0)
    assert type(norm) is torch.Tensor
    assert (norm.dim(), norm.requires_grad, norm.grad_fn) == (0, False, None)


@pytest.mark.parametrize(
    ("dtypes", "wanted"),
    [
        ([torch.float16], torch.float32),
        ([torch.bfloat16, torch.float32], torch.float32),
        ([torch.float32, torch.float64], torch.float64),
        ([torch.complex64], torch.float32),
        ([torch.bfloat16, torch.complex128], torch.float64),
        ([torch.float8_e5m2], torch.float32),
    ],
)
def test_dtype_of_the_norm(dtypes: list[torch.dtype], wanted: torch.dtype, route: str) -> None:
    owners = parameters([torch.ones(2).to(dtype) for dtype in dtypes])
    assert gradclip.clip_grad_norm_(owners, 1.0).dtype == wanted
    assert gradclip.clip_(owners, 1.0, dtype=torch.float64).dtype == torch.float64
    assert gradclip.clip_(owners, 1.0, dtype=torch.bfloat16).dtype == torch.bfloat16
