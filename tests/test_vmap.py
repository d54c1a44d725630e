"""Norms and clips of each sample inside of `torch.func.vmap`."""

import math
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor

import gradclip
from tests import oracle
from tests.gradients import EXACT_NORMS, random_values

BATCH = 5


def owner(gradient: Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.main_grad = gradient  # type: ignore[attr-defined]
    return parameter


@pytest.mark.parametrize("p", [*EXACT_NORMS, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_each_sample_has_its_own_exact_norm(p: float, dtype: torch.dtype) -> None:
    first = random_values((BATCH, 3, 4), dtype, spread=9, seed=1)
    second = random_values((7, BATCH), dtype, spread=9, seed=2)

    def norm(a: Tensor, b: Tensor) -> Tensor:
        return gradclip.get_total_norm([a, b], p, dtype=torch.float64)

    found = torch.func.vmap(norm, in_dims=(0, 1))(first, second)
    alone = [norm(first[i], second[:, i]).item() for i in range(BATCH)]
    assert found.tolist() == alone
    assert torch.func.vmap(norm, in_dims=(0, None))(first, second[:, 0]).tolist() == [
        norm(first[i], second[:, 0]).item() for i in range(BATCH)
    ]


def test_maps_inside_of_maps() -> None:
    values = random_values((2, 3, 4), torch.float32, seed=3)
    norm: Callable[[Tensor], Tensor] = lambda g: gradclip.get_total_norm([g])  # noqa: E731
    found = torch.func.vmap(torch.func.vmap(norm))(values)
    assert found.tolist() == [[norm(values[i, j]).item() for j in range(3)] for i in range(2)]


def test_no_sample_and_what_is_no_sample() -> None:
    plain = torch.tensor([3.0, 4.0])
    found = torch.func.vmap(lambda g: g * gradclip.get_total_norm([plain]))(torch.ones(2, 1))
    assert found.tolist() == [[5.0], [5.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("scale", [None, 4.0])
def test_each_sample_is_clipped_by_its_own_norm(dtype: torch.dtype, scale: float | None) -> None:
    values = random_values((BATCH, 6), dtype, spread=2, seed=4)
    values[0] /= 2**12
    written = values.clone()

    def clip(gradient: Tensor) -> Tensor:
        return gradclip.clip_([owner(gradient)], 1.0, grad="main_grad", scale=scale)

    norms = torch.func.vmap(clip)(written)
    for i in range(BATCH):
        alone = values[i].clone()
        assert clip(alone).item() == norms[i].item()
        assert oracle.same_bits(written[i], alone)


def test_a_norm_and_its_scaling_apart() -> None:
    values = random_values((BATCH, 6), torch.float32, seed=5)
    written = values.clone()

    def clip(gradient: Tensor) -> Tensor:
        norm = gradclip.get_total_norm([gradient])
        gradclip.clip_grads_with_norm_([owner(gradient)], 1.0, norm, grad="main_grad")
        return norm

    torch.func.vmap(clip)(written)
    for i in range(BATCH):
        want = oracle.clipped(values[i], oracle.total_norm([values[i]]), 1.0)
        assert oracle.same_bits(written[i], want)


def test_other_functions() -> None:
    values = torch.tensor([[3.0, -4.0], [0.5, 1.0]])

    def change(gradient: Tensor) -> Tensor:
        gradclip.scale_([gradient], 0.5)
        gradclip.clip_grad_value_([owner(gradient)], 1.0, grad="main_grad")
        return gradclip.grad_norms(
            [owner(gradient), owner(gradient * 2)], math.inf, grad="main_grad"
        )

    assert torch.func.vmap(change)(values).tolist() == [[1.0, 2.0], [0.5, 1.0]]
    assert values.tolist() == [[1.0, -1.0], [0.25, 0.5]]


def test_gradients_of_each_sample() -> None:
    """The way of private training: the gradient of each sample, clipped inside of the map."""
    weight = torch.tensor([1.0, 2.0])
    inputs = torch.tensor([[1.0, 0.0], [0.0, 2.0]])

    def one(x: Tensor) -> Tensor:
        gradient = torch.func.grad(lambda w: (w * x).sum())(weight)
        gradclip.clip_([owner(gradient)], 1.0, eps=0.0, grad="main_grad")
        return cast(Tensor, gradient)

    assert torch.func.vmap(one)(inputs).tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_a_bad_sample_is_refused_before_any_is_written() -> None:
    values = torch.tensor([[3.0, 4.0], [math.nan, 1.0]])
    with pytest.raises(RuntimeError, match="of a sample is non-finite"):
        torch.func.vmap(
            lambda g: gradclip.clip_([owner(g)], 1.0, error_if_nonfinite=True, grad="main_grad")
        )(values)
    assert values[0].tolist() == [3.0, 4.0]


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd])
def test_derivatives_of_a_norm_are_refused(
    transform: Callable[..., Callable[[Tensor], Tensor]], route: str
) -> None:
    values = torch.tensor([3.0, 4.0])
    with pytest.raises(TypeError, match=r"gradient of parameter 0 (is inside of|carries)"):
        transform(lambda g: gradclip.get_total_norm([g]))(values)
