"""What is done to a total norm in place counts; an untouched one stands for its float64."""

import copy
import math
import random
from collections.abc import Callable

import pytest
import torch

import gradclip
from tests import oracle
from tests.gradients import gradient_of, parameters, random_values

Write = Callable[[torch.Tensor], object]


def nothing(total: torch.Tensor) -> None:
    """Reads only."""
    assert total.item() == float(total.detach())


def through_a_view(total: torch.Tensor) -> None:
    total.view(1)[0] = total * 2


def by_as_strided(total: torch.Tensor) -> None:
    total.as_strided((1,), (1,)).mul_(0.5)


def the_same_value(total: torch.Tensor) -> None:
    total.copy_(total.clone())


WRITES: dict[str, Write] = {
    "nothing": nothing,
    "pow_": lambda total: total.pow_(2),
    "sqrt_": lambda total: total.sqrt_(),
    "mul_": lambda total: total.mul_(3),
    "mul_ by 1": lambda total: total.mul_(1),
    "mul_ rounding to the same": lambda total: total.mul_(1 + 1e-12),
    "add_ of 0": lambda total: total.add_(0),
    "copy_ of itself": the_same_value,
    "fill_ with itself": lambda total: total.fill_(total.item()),
    "clamp_": lambda total: total.clamp_(max=1e30),
    "a view": through_a_view,
    "as_strided": by_as_strided,
    "detach": lambda total: total.detach().mul_(2),
    "out=": lambda total: torch.mul(total, 1, out=total),
    "data": lambda total: total.data.mul_(2),
    "NumPy": lambda total: total.numpy().__imul__(2),
    "foreach": lambda total: torch._foreach_mul_([total], 0.5),
}
"""Writes; after each one the tensor's own value counts, except after the first."""


def scaled_by(
    gradient: torch.Tensor, total: float | torch.Tensor, max_norm: float = 0.5
) -> torch.Tensor:
    (owner,) = parameters([gradient.clone()])
    gradclip.clip_grads_with_norm_([owner], max_norm, total)
    return gradient_of(owner)


def inexact() -> torch.Tensor:
    """Gradients in float64 whose total norm is no float32 number, nor its clip the same."""
    return random_values(1000, torch.float64, seed=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_counts(name: str, dtype: torch.dtype, route: str) -> None:
    if name == "NumPy" and dtype == torch.bfloat16:
        pytest.skip("NumPy has no bfloat16")
    gradient = inexact()
    total = gradclip.get_total_norm([gradient], dtype=dtype)
    exact = gradclip.get_total_norm([gradient], dtype=torch.float64).item()
    WRITES[name](total)
    want = scaled_by(gradient, exact if name == "nothing" else total.item())
    assert oracle.same_bits(scaled_by(gradient, total), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_float64_behind_a_total_shows(dtype: torch.dtype) -> None:
    """Otherwise the tests of this file could not tell a forgotten total from a remembered one."""
    gradient = inexact()
    total = gradclip.get_total_norm([gradient], dtype=dtype)
    assert not oracle.same_bits(scaled_by(gradient, total), scaled_by(gradient, total.item()))


@pytest.mark.parametrize("seed", range(40))
def test_random_writes_beside_a_plain_tensor(seed: int) -> None:
    """After any writes the scaling is that by a tensor which remembers nothing."""
    choice = random.Random(seed)
    gradient = random_values(50, torch.float64, seed=seed)
    dtype = choice.choice([torch.float32, torch.float64, torch.bfloat16])
    names = choice.sample([n for n in WRITES if n not in ("nothing", "data", "NumPy")], 3)
    total = gradclip.get_total_norm([gradient], dtype=dtype)
    model = torch.tensor(total.item(), dtype=dtype)
    for name in names:
        WRITES[name](total)
        WRITES[name](model)
        assert oracle.same_bits(total, model)
        want = scaled_by(gradient, model.item())
        assert oracle.same_bits(scaled_by(gradient, total), want), names


def test_a_total_made_in_inference_mode_is_known_by_its_value() -> None:
    gradient = inexact()
    with torch.inference_mode():
        total = gradclip.get_total_norm([gradient])
        exact = gradclip.get_total_norm([gradient], dtype=torch.float64).item()
        assert total.is_inference()
        assert oracle.same_bits(scaled_by(gradient, total), scaled_by(gradient, exact))
        total.mul_(2)
        assert oracle.same_bits(scaled_by(gradient, total), scaled_by(gradient, total.item()))


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_special_totals_written_in_place(value: float) -> None:
    gradient = torch.tensor([3.0, 4.0])
    total = gradclip.get_total_norm([gradient]).fill_(value)
    assert oracle.same_bits(scaled_by(gradient, total), scaled_by(gradient, value))


def test_a_copy_of_a_total_counts_by_its_value_once_written() -> None:
    gradient = inexact()
    total = copy.deepcopy(gradclip.get_total_norm([gradient]))
    total.mul_(1)
    assert oracle.same_bits(scaled_by(gradient, total), scaled_by(gradient, total.item()))


def test_writes_leave_the_clippers_coefficient() -> None:
    """It is that of the clip, whatever became of the tensor."""
    (owner,) = parameters([torch.tensor([3.0, 4.0])])
    clipper = gradclip.Clipper([owner], 2.5, eps=0.0)
    clipper.clip_().mul_(100)
    assert clipper.coefficient == 0.5
