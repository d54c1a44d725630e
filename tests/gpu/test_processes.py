"""Processes that were started by one that uses CUDA."""

import multiprocessing
from multiprocessing.process import BaseProcess

import pytest
import torch
from torch import Tensor, nn

import gradclip
from tests import oracle

from .support import DEVICE, clips_exactly, parameters, refused, run_alone

pytestmark = pytest.mark.gpu

FORKED = "Cannot re-initialize CUDA in forked subprocess"


def ends_well(process: BaseProcess) -> None:
    process.start()
    process.join(timeout=120)
    hangs = process.is_alive()
    process.kill()
    assert not hangs
    assert process.exitcode == 0


def clip_on_threads(tensor: Tensor) -> None:
    """A clip on the host, by several threads; torch's own work on one, as they outlive no fork."""
    copy = tensor.clone()
    torch.set_num_threads(4)
    total = gradclip.clip_(parameters([tensor]), 1.0, dtype=torch.float64)
    torch.set_num_threads(1)
    assert float(total) == (exact := oracle.total_norm([copy]))
    assert torch.equal(tensor, oracle.clipped(copy, exact, 1.0))


def clip_before_and_after_a_fork() -> None:
    torch.set_num_threads(1)
    on_device = parameters([torch.randn(1000, device=DEVICE)])
    gradclip.clip_(on_device, 1.0)
    clip_on_threads(torch.randn(200_000))
    context = multiprocessing.get_context("fork")
    ends_well(context.Process(target=clip_in_the_fork, args=(on_device,)))
    clips_exactly([torch.randn(1000, device=DEVICE)])


def clip_in_the_fork(on_device: list[nn.Parameter]) -> None:
    clip_on_threads(torch.randn(200_000))
    host = torch.randn(1000)
    both = [*parameters([host]), *on_device]
    with refused([host], FORKED):
        gradclip.clip_(on_device, 0.5)
    with refused([host], FORKED):
        gradclip.clip_(both, 0.5)
    with refused([host], FORKED):
        gradclip.clip_grad_value_(both, 1e-3)
    with refused([host], FORKED):
        gradclip.grad_norms(both)


def fork_before_the_first_clip() -> None:
    torch.set_num_threads(1)
    on_device = parameters([torch.randn(1000, device=DEVICE)])
    torch.cuda.synchronize()
    context = multiprocessing.get_context("fork")
    ends_well(context.Process(target=clip_in_the_fork, args=(on_device,)))


def test_a_forked_child_clips_on_the_host_and_is_refused_on_the_device() -> None:
    run_alone(clip_before_and_after_a_fork)
    run_alone(fork_before_the_first_clip)


def clip_on_the_device() -> None:
    clips_exactly([torch.randn(70_001, device=DEVICE), torch.randn(9, device=DEVICE).half()])


def test_a_spawned_child_clips_on_the_device() -> None:
    clip_on_the_device()
    ends_well(multiprocessing.get_context("spawn").Process(target=clip_on_the_device))
