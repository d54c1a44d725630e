"""Gradients that are ones, pending sums or asynchronous, and the functions beside the clip."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import gradclip
from tests import oracle
from tests.distributed import cases
from tests.distributed.cases import gradients
from tests.distributed.world import World

pytestmark = pytest.mark.distributed

INF = math.inf


def ones(rank: int) -> None:
    """All-ones gradients give numel^(1/p) for every layout; zero counting counts all."""
    both, line = cases.mesh(2, 2, names="dp tp"), cases.mesh(4)
    placed: list[tuple[Any, ...]] = [
        (both, Shard(0), Shard(1)), (both, Replicate(), Shard(0)), (both, Shard(0), Shard(0)),
        (both, Replicate(), Replicate()), (both["dp"], Shard(0)), (both["tp"], Replicate()),
        (line, Shard(0)), (line, Replicate()),
    ]  # fmt: skip
    for on, *where in placed:
        owner = cases.parameter(torch.ones(16, 4), on, *where)
        for norm_type, expected in ((1.0, 64.0), (2.0, 8.0), (3.0, 4.0), (0.0, 64.0), (INF, 1.0)):
            total = gradclip.get_total_norm([cases.gradient(owner)], norm_type)
            assert total.item() == expected, (where, norm_type)
        total = gradclip.clip_([owner], 4.0, eps=0.0)
        assert total.item() == 8.0
        assert bool((cases.local(owner) == 0.5).all())


def test_all_ones_count_their_elements(four: World) -> None:
    four.run(ones)


def partial_in_stages(rank: int) -> None:
    """Partial over both dimensions, sums and averages, two dtypes: one bucket each."""
    both = cases.mesh(2, 2)
    made = torch.Generator().manual_seed(rank)
    layouts = [(Partial(), Shard(0)), (Partial("avg"), Partial()), (Replicate(), Partial())]
    for norm_type in cases.NORM_TYPES:
        owners = []
        for where in layouts:
            for dtype in (torch.float32, torch.bfloat16):
                piece = torch.randint(-8, 8, (3, 5), generator=made).to(dtype)
                if where[0].is_replicate():
                    dist.broadcast(piece, rank % 2, group=both.get_group(0))
                owner = torch.nn.Parameter(torch.zeros(3, 5, dtype=dtype))
                owner.grad = None
                placed = DTensor.from_local(piece, both, list(where), run_check=False)
                holder = torch.nn.Parameter(placed.detach().clone())
                holder.grad = placed
                owners.append(holder)
        full = [cases.whole(owner) for owner in owners]
        cases.check_clip(owners, full, norm_type, buckets=4)


def test_partial_sums_and_averages(four: World) -> None:
    four.run(partial_in_stages)


def refused_partial(rank: int) -> None:
    line = cases.mesh(2)
    placed = DTensor.from_local(torch.ones(3), line, [Partial("max")], run_check=False)
    with pytest.raises(
        gradclip.sharding.ShardedClipError, match=r"rank 0: `w`: placement Partial\(max\)"
    ):
        gradclip.get_total_norm([("w", placed)])


def test_other_partial_reductions_are_refused(two: World) -> None:
    two.run(refused_partial)


def asynchronous(rank: int) -> None:
    """A gradient whose local tensor is still being filled by a collective is waited for."""
    line = cases.mesh(2)
    pending = DTensor.from_local(torch.full((4,), 1.0 + rank), line, [Partial()], run_check=False)
    filled = pending.redistribute(placements=[Replicate()], async_op=True)
    assert type(filled._local_tensor) is not torch.Tensor
    total = gradclip.get_total_norm([filled], dtype=torch.float64)
    assert total.item() == 6.0


def test_asynchronous_gradients_are_waited_for(two: World) -> None:
    two.run(asynchronous)


def own_and_scaled(rank: int) -> None:
    """Norms of each parameter, scaling by a given norm, values, a loss scale."""
    both = cases.mesh(2, 2, names="dp tp")
    full = gradients((7, 3), (6,), (2, 2))
    owners = [
        cases.parameter(full[0], both, Shard(0), Replicate()),
        cases.parameter(full[1], both["tp"], Shard(0)),
        cases.parameter(full[2]),
    ]
    for norm_type in (*cases.NORM_TYPES, 2.5):
        asked: Any = {"dtype": torch.float64, "check_replicas": False}
        with cases.counted_calls() as calls:
            each = gradclip.grad_norms(owners, norm_type, **asked)
        assert calls == ["all_reduce"] * 2
        assert each.tolist() == [cases.one_process_norm([g], norm_type) for g in full]
    kept = [cases.local(owner).clone() for owner in owners]
    total = gradclip.get_total_norm([cases.gradient(o) for o in owners])
    with cases.counted_calls() as calls:
        gradclip.clip_grads_with_norm_(owners, 0.5, total)
    assert calls == []
    wanted = oracle.clipped(kept[0], cases.one_process_norm(full, 2.0), 0.5)
    assert torch.equal(cases.local(owners[0]), wanted)
    for owner, values in zip(owners, kept, strict=True):
        cases.local(owner).copy_(values)
    scaled = gradclip.clip_(owners, 0.5, scale=4.0, dtype=torch.float64)
    assert scaled.item() == cases.one_process_norm(full, 2.0) / 4
    gradclip.clip_grad_value_(owners, 0.01)
    assert float(cases.local(owners[0]).abs().max()) <= 0.01
    pending = DTensor.from_local(torch.ones(3), both["tp"], [Partial()], run_check=False)
    with pytest.raises(ValueError, match="its sum is still pending"):
        gradclip.clip_grad_value_([pending.requires_grad_()], 0.5, grad="data")


def test_the_other_functions(four: World) -> None:
    four.run(own_and_scaled)


def norms_of_stages(rank: int) -> None:
    """Each rank gets the norms of its own stage's parameters, from one collective."""
    world = cases.mesh(2, 2, names="pp dp")
    first, last = gradients((6, 2), (5,), (1,)), gradients((9,), seed=1)
    mine = first if world.get_local_rank("pp") == 0 else last
    owners = [cases.parameter(g, world["dp"], Shard(0)) for g in mine]
    each = gradclip.grad_norms(owners, dtype=torch.float64)
    assert each.tolist() == [cases.one_process_norm([g], 2.0) for g in mine]


def test_norms_of_the_parameters_of_stages(four: World) -> None:
    four.run(norms_of_stages)


def unwritten(rank: int) -> None:
    """Below the limit no bit and no version counter changes."""
    line = cases.mesh(2)
    (full,) = gradients((5, 2))
    owner = cases.parameter(full, line, Shard(0))
    version = cases.local(owner)._version
    gradclip.clip_([owner], 1e6)
    assert torch.equal(cases.local(owner), full.chunk(2)[rank])
    assert cases.local(owner)._version == version


def test_below_the_limit_nothing_is_written(two: World) -> None:
    two.run(unwritten)
