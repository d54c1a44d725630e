"""The clip whose verdict the host reads later, with a stand-in for a device's engine on the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import gradclip
from gradclip import _core, engine
from gradclip.gradients import Gradients
from gradclip.sharding import ShardedClipError, deferred
from tests import oracle
from tests.distributed import cases
from tests.distributed.world import World

pytestmark = pytest.mark.distributed

INF = math.inf


class StandIn:
    """The CPU engine behind the interface of a device's."""

    def __init__(self, gradients: Gradients) -> None:
        self.gradients = gradients

    def sums(self, norm_type: float) -> torch.Tensor:
        return torch.tensor(engine.sums(self.gradients, norm_type).to_list(), dtype=torch.int64)

    def finish(
        self, sums: torch.Tensor, norm_type: float, max_norm: float, eps: float, loss_scale: float
    ) -> torch.Tensor:
        total = _core.Sums.from_list(sums.tolist()).total(norm_type)
        assert total is not None
        total /= loss_scale
        coefficient = _core.coefficient(total, max_norm, eps)
        numbers = [total, coefficient, coefficient / loss_scale, 0.0]
        result = torch.tensor(numbers, dtype=torch.float64)
        result.view(torch.float32)[6] = total
        return result

    def scale_(self, factor: torch.Tensor) -> None:
        engine.scale_(self.gradients, factor.item())


@contextmanager
def on_a_device() -> Iterator[None]:
    """Clips are deferred inside."""
    original = deferred.engine_for
    deferred.engine_for = lambda gradients, device: StandIn(gradients)
    try:
        yield
    finally:
        deferred.engine_for = original


def read(clipper: gradclip.Clipper) -> Any:
    return clipper.coefficient


def deferred_steps(rank: int) -> None:
    """The first call is the host's, those that follow are not; the same bits, one collective."""
    both = cases.mesh(2, 2)
    for norm_type in (0.0, 1.0, 2.0, INF, -INF):
        torch.manual_seed(3)
        full = [torch.randn(7, 3), torch.randn(6)]
        owners = [
            cases.parameter(full[0], both, Shard(0), Replicate()),
            cases.parameter(full[1]),
        ]
        clipper = gradclip.Clipper(owners, INF, norm_type, dtype=torch.float64)
        with on_a_device():
            expected = clipper.clip_().item()
            clipper.clip_()  # replicas are compared once more
            assert isinstance(read(clipper), float)
            assert expected == oracle.total_norm(full, norm_type)
            clipper.max_norm = 0.5 * expected
            before = [cases.local(owner).clone() for owner in owners]
            with cases.counted_calls() as calls:
                total = clipper.clip_()
            assert calls == ["all_reduce"]
            assert isinstance(read(clipper), torch.Tensor)
            assert total.item() == expected
            for owner, was in zip(owners, before, strict=True):
                wanted = oracle.clipped(was, expected, clipper.max_norm)
                assert torch.equal(cases.local(owner), wanted)
            clipper.check()


def test_deferred_clips_have_the_same_bits(four: World) -> None:
    four.run(deferred_steps)


def told_later(rank: int) -> None:
    """A rank that fails raises at once, the other at its next call; nothing changes; then good."""
    line = cases.mesh(2)
    for norm_type in (2.0, INF):
        fine = cases.parameter(torch.ones(4), line, Shard(0))
        odd = cases.parameter(torch.ones(3))
        named = [("fine", fine), ("odd", odd)]
        clipper = gradclip.Clipper(named, 0.5, norm_type, plain="distinct")
        with on_a_device():
            clipper.clip_()
            clipper.clip_()
            kept, odd_gradient = cases.local(fine).clone(), odd.grad
            clipper.max_norm = 0.25
            if rank == 1:
                base = torch.ones(8)
                cases.gradient(fine)._local_tensor, odd.grad = base[:2], base[1:4]
                with pytest.raises(ShardedClipError, match=r"rank 1: .*no gradient was changed"):
                    clipper.clip_()
                assert bool((base == 1).all())
                cases.gradient(fine)._local_tensor, odd.grad = kept.clone(), odd_gradient
            else:
                clipper.clip_()
                assert torch.equal(cases.local(fine), kept)
            with pytest.raises(ShardedClipError, match=r"rank 1|ranks|rank 0"):
                clipper.clip_()
            assert torch.equal(cases.local(fine), kept)
            assert clipper.clip_().item() > 0
            clipper.check()


def test_a_failure_is_told_to_the_others_later(two: World) -> None:
    two.run(told_later)


def disagreeing(rank: int) -> None:
    """Limits that differ: the device leaves the gradients alone, and asking tells why."""
    line = cases.mesh(2)
    owner = cases.parameter(torch.ones(4), line, Shard(0))
    clipper = gradclip.Clipper([owner], 0.5)
    with on_a_device():
        clipper.clip_()
        kept = cases.local(owner).clone()
        clipper.max_norm = 0.1 + 0.1 * rank
        clipper.clip_()
        assert torch.equal(cases.local(owner), kept)
        with pytest.raises(ShardedClipError, match="ranks disagree about max_norm"):
            clipper.check()
        clipper.check()
        clipper.max_norm = 0.1
        clipper.clip_()
        assert not torch.equal(cases.local(owner), kept)
        for first, other in ((2.0, INF), (INF, 1.0)):
            clipper.norm_type = first if rank == 0 else other
            kept = cases.local(owner).clone()
            clipper.clip_()
            assert torch.equal(cases.local(owner), kept)
            with pytest.raises(ShardedClipError, match="ranks disagree about norm_type"):
                clipper.check()


def test_disagreement_is_told_when_asked(two: World) -> None:
    two.run(disagreeing)


def mixed_modes(rank: int) -> None:
    """One rank's host waits for the verdict, the other's does not; nobody hangs."""
    line = cases.mesh(2)
    owner: Any = cases.parameter(torch.ones(4), line, Replicate())
    clipper = gradclip.Clipper([("w", owner)], INF)
    for _ in range(4):
        clipper.clip_()
    with on_a_device():
        if rank == 0:
            with on_a_device():
                deferred.engine_for = lambda gradients, device: None
                assert clipper.clip_().item() == 2.0
        else:
            assert clipper.clip_().item() == 2.0
        if rank == 0:
            owner.grad = None
            deferred.engine_for = lambda gradients, device: None
            with pytest.raises(ShardedClipError, match="check_replicas=True names them"):
                clipper.clip_()
        else:
            clipper.clip_()
            with pytest.raises(ShardedClipError, match="check_replicas=True names them"):
                clipper.check()


def test_hosts_that_wait_beside_hosts_that_do_not(two: World) -> None:
    two.run(mixed_modes)
