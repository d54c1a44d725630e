"""Threads that read subnormals as zero: the total and the clipped bits stay the same."""

import math
from collections.abc import Iterator

import pytest
import torch

import gradclip
from tests import oracle
from tests.gradients import EXACT_NORMS, REAL_DTYPES, gradient_of, parameters, random_values, total


@pytest.fixture
def _flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormals")
    yield
    torch.set_flush_denormal(False)


def subnormal_gradients(length: int) -> list[torch.Tensor]:
    """Gradients that are subnormal, or become it when scaled."""
    return [
        (random_values(length, torch.float64, seed=seed) * torch.finfo(dtype).tiny / 4).to(dtype)
        for seed, dtype in enumerate(REAL_DTYPES)
    ]


@pytest.mark.usefixtures("_flushing")
def test_the_mode_is_on() -> None:
    assert (torch.tensor([1e-310], dtype=torch.float64) * 1.0).item() == 0.0


@pytest.mark.parametrize("p", [*EXACT_NORMS, 3.0])
@pytest.mark.parametrize("threads", [1, 2])
def test_norms(p: float, threads: int, route: str) -> None:
    torch.set_num_threads(threads)
    gradients = subnormal_gradients(70_000 if route == "fused" and threads > 1 else 1001)
    want = total(gradients, p)
    assert want > 0 or p == -math.inf
    if p != 3.0:
        assert want == oracle.total_norm(gradients, p)
    assert torch.set_flush_denormal(True)
    try:
        assert total(gradients, p) == want
        assert (torch.tensor([1e-310], dtype=torch.float64) * 1.0).item() == 0.0
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("threads", [1, 2])
def test_clipped_gradients(threads: int) -> None:
    torch.set_num_threads(threads)
    gradients = [*subnormal_gradients(70_001), torch.tensor([3.0, 4.0])]
    want = [oracle.clipped(gradient, oracle.total_norm(gradients), 1.0) for gradient in gradients]
    owners = parameters(gradient.clone() for gradient in gradients)
    assert torch.set_flush_denormal(True)
    try:
        gradclip.clip_(owners, 1.0)
    finally:
        torch.set_flush_denormal(False)
    for owner, gradient in zip(owners, want, strict=True):
        assert oracle.same_bits(gradient_of(owner), gradient)


def test_limited_gradients() -> None:
    tiny = torch.finfo(torch.float32).tiny
    gradients = [torch.tensor([tiny / 2, -tiny / 2, tiny / 8, 1.0])]
    owners = parameters(gradient.clone() for gradient in gradients)
    assert torch.set_flush_denormal(True)
    try:
        gradclip.clip_grad_value_(owners, tiny / 4)
    finally:
        torch.set_flush_denormal(False)
    assert gradient_of(owners[0]).tolist() == [tiny / 4, -tiny / 4, tiny / 8, tiny / 4]


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 0.5, -1.0, math.inf, -math.inf])
def test_a_total_that_is_subnormal(p: float) -> None:
    """The finish works in IEEE's mode too, the search for a scale among it."""
    gradients = [torch.full((4,), 1e-310, dtype=torch.float64)]
    want = gradclip.get_total_norm(gradients, p).view(torch.int64)
    torch.set_flush_denormal(True)
    try:
        found = gradclip.get_total_norm(gradients, p).view(torch.int64)
    finally:
        torch.set_flush_denormal(False)
    assert want.item() != 0
    assert found.item() == want.item()
