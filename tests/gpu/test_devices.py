"""Gradients on other devices than the current one, and on several."""

from collections.abc import Iterator

import pytest
import torch

import gradclip
from tests import oracle

from .support import clips_exactly, parameters

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


LIMIT = 2.0**-12


@pytest.fixture(params=[0, 1])
def current(request: pytest.FixtureRequest) -> Iterator[int]:
    """The current device, as the caller has set it."""
    index: int = request.param
    torch.cuda.set_device(index)
    yield index
    torch.cuda.set_device(0)


@pytest.mark.parametrize("on", [[0], [1], [0, 1], [1, 0]])
def test_any_device_may_be_current(on: list[int], current: int) -> None:
    made = [torch.randn(70_001 + k, device=f"cuda:{k}") for k in on]
    made += [torch.randn(300 + k, device=f"cuda:{k}").bfloat16() for k in on]
    clips_exactly(made)
    assert torch.cuda.current_device() == current
    total = gradclip.clip_(parameters(made), 0.5)
    gradclip.clip_grad_value_(parameters(made), LIMIT)
    assert total.device == made[0].device
    assert torch.cuda.current_device() == current
    assert [float(tensor.abs().max()) for tensor in made] == [LIMIT] * len(made)


def test_kernels_run_on_the_other_device_s_current_stream() -> None:
    """Other streams would read and write before the gradient is there."""
    gradient, fresh = (torch.full((100_000,), k, device="cuda:1") for k in (0.0, 3.0))
    made = parameters([gradient])
    side = torch.cuda.Stream("cuda:1")
    torch.cuda.synchronize("cuda:1")
    with torch.cuda.stream(side):
        gradclip.clip_(made, 1.0)  # what is loaded and allocated once is there from now on
        torch.cuda._sleep(100_000_000)
        gradient.copy_(fresh)
        with torch.cuda.device(0):
            total = gradclip.clip_(made, 1.0, dtype=torch.float64)
            assert torch.cuda.current_device() == 0
    torch.cuda.synchronize("cuda:1")
    copy = fresh.cpu()
    assert float(total) == (exact := oracle.total_norm([copy]))
    assert torch.equal(gradient.cpu(), oracle.clipped(copy, exact, 1.0))
