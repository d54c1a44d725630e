"""Pipeline stages, experts and copies: what a rank holds that others do not, or hold too."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

import gradclip
from tests.distributed import cases, models
from tests.distributed.cases import again, gradients
from tests.distributed.world import World

pytestmark = pytest.mark.distributed

INF = math.inf


def stages(rank: int) -> None:
    world = cases.mesh(2, 2, 2, names="pp dp tp")
    stage = world.get_local_rank("pp")
    owners = models.sharded_tensor_parallel(world["dp"], world["tp"], seed=stage)
    full = [cases.whole(owner) for owner in owners]
    both: list[Any] = [None] * 8
    dist.all_gather_object(both, full)
    again(owners, lambda p: cases.check_clip(owners, [*both[0], *both[4]], p))


def test_pipeline_stages_of_fsdp2_and_tensor_parallel(eight: World) -> None:
    eight.run(stages)


def plain_stages(rank: int) -> None:
    world = cases.mesh(2, 4, names="pp tp")
    stage = world.get_local_rank("pp")
    owners = models.tensor_parallel(world["tp"], seed=stage)
    full = [cases.whole(owner) for owner in owners]
    both: list[Any] = [None] * 8
    dist.all_gather_object(both, full)
    again(owners, lambda p: cases.check_clip(owners, [*both[0], *both[4]], p))


def test_pipeline_stages_with_plain_norms(eight: World) -> None:
    eight.run(plain_stages)


def unequal_stages(rank: int) -> None:
    """Stage 0 has three parameters, stage 1 one, and rank 3 of stage 1 no gradient at all."""
    world = cases.mesh(2, 2, names="pp dp")
    first, last = gradients((6, 2), (5,), (1,)), gradients((9,), seed=1)
    mine = first if world.get_local_rank("pp") == 0 else last
    for norm_type in cases.NORM_TYPES:
        owners = [cases.parameter(g, world["dp"], Shard(0)) for g in mine]
        cases.check_clip(owners, [*first, *last], norm_type)


def test_stages_of_different_parameters(four: World) -> None:
    four.run(unequal_stages)


def empty_stage(rank: int) -> None:
    world = cases.mesh(2, 2, names="pp dp")
    full = gradients((6, 2), (5,))
    mine = full if world.get_local_rank("pp") == 0 else []
    for norm_type in cases.NORM_TYPES:
        owners = [cases.parameter(g, world["dp"], Shard(0)) for g in mine]
        expected = cases.one_process_norm(full, norm_type)
        named = [(f"w{k}", owner) for k, owner in enumerate(owners)]
        total = gradclip.clip_(named, 0.1, norm_type, dtype=torch.float64, group=dist.group.WORLD)
        assert total.item() == expected


@pytest.mark.filterwarnings("ignore:an empty list")
def test_a_stage_without_parameters_takes_part(four: World) -> None:
    four.run(empty_stage)


def expert_parallel(rank: int) -> None:
    """Experts on meshes of their own, sharded twice and once, beside dense weights."""
    dense, sparse = cases.mesh(4, 2, names="dp tp"), cases.mesh(2, 4, names="efsdp ep")
    experts, more, weight, norm = gradients((8, 5, 3), (4, 2), (7, 5), (5,))
    for norm_type in cases.NORM_TYPES:
        owners = [
            cases.parameter(experts, sparse, Shard(1), Shard(0)),
            cases.parameter(more, sparse["ep"], Shard(0)),
            cases.parameter(weight, dense, Shard(0), Replicate()),
            cases.parameter(norm, dense["dp"], Shard(0)),
        ]
        cases.check_clip(owners, [experts, more, weight, norm], norm_type)


def test_experts_on_their_own_mesh(eight: World) -> None:
    eight.run(expert_parallel)


def plain_experts(rank: int) -> None:
    """Hand-made expert parallelism: each rank has its own plain expert, declared so."""
    line = cases.mesh(2)
    experts = gradients((3, 4), (3, 4), seed=5)
    (dense,) = gradients((6, 2))
    for norm_type in cases.NORM_TYPES:
        owners = [cases.parameter(dense, line, Shard(0)), cases.parameter(experts[rank])]
        cases.check_clip(owners, [dense, *experts], norm_type, plain="distinct")
        named = dict(zip(("dense", "expert"), owners, strict=True))
        for owner, values in zip(owners, (dense.chunk(2)[rank], experts[rank]), strict=True):
            cases.local(owner).copy_(values)
        total = gradclip.get_total_norm(
            [(name, cases.gradient(owner)) for name, owner in named.items()],
            norm_type,
            dtype=torch.float64,
            replicas={"expert": "distinct"},
        )
        assert total.item() == cases.one_process_norm([dense, *experts], norm_type)


def test_plain_experts_when_declared(two: World) -> None:
    two.run(plain_experts)


def four_experts(rank: int) -> None:
    """Norms 1, 2, 3, 4 over two ranks, wherever they live: sqrt(30)."""
    line = cases.mesh(2)
    full = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    halves = full.chunk(2)
    settings: list[tuple[list[Any], dict[str, Any]]] = [
        ([cases.parameter(full, line, Shard(0))], {}),
        ([cases.parameter(full, line, Replicate())], {}),
        ([cases.parameter(halves[rank])], {"group": dist.group.WORLD}),
        ([cases.parameter(full)] if rank == 0 else [], {"group": dist.group.WORLD}),
        ([cases.parameter(full)], {"group": dist.group.WORLD, "plain": "replicated"}),
    ]
    for owners, sharding in settings:
        total = gradclip.clip_(owners, 1.0, dtype=torch.float64, **sharding)
        assert total.item() == math.sqrt(30)


@pytest.mark.filterwarnings("ignore:an empty list")
def test_four_experts_wherever_they_live(two: World) -> None:
    two.run(four_experts)


def tied(rank: int) -> None:
    """An embedding of 800 elements of norm 20 on both stages: 20 once, not 28.28."""
    world = cases.mesh(2, 2, names="pp dp")
    full = torch.full((40, 20), 20 / math.sqrt(800))
    owner = cases.parameter(full, world["dp"], Shard(0))
    twice = gradclip.clip_([("embed", owner)], INF, dtype=torch.float64)
    assert twice.item() == cases.one_process_norm([full, full.clone()], 2.0)
    for said in (world["pp"], world.get_group("pp"), [rank % 2, rank % 2 + 2]):
        total = gradclip.clip_(
            [("embed", owner)], INF, dtype=torch.float64, replicas={"embed": said}
        )
        assert total.item() == cases.one_process_norm([full], 2.0)
    plain = cases.parameter(full)
    total = gradclip.clip_(
        [plain],
        INF,
        dtype=torch.float64,
        group=dist.group.WORLD,
        replicas=lambda name, p: "distinct" if rank == 3 else "elsewhere",
    )
    assert total.item() == cases.one_process_norm([full], 2.0)


def test_a_tied_embedding_counts_once_when_declared(four: World) -> None:
    four.run(tied)


def one_stage_copies(rank: int) -> None:
    """Replicate on one stage, Shard on the other: 64 + 128 = 192 elements of one."""
    world = cases.mesh(2, 2, names="pp ep")
    if world.get_local_rank("pp") == 0:
        owner = cases.parameter(torch.ones(64), world["ep"], Replicate())
    else:
        owner = cases.parameter(torch.ones(128), world["ep"], Shard(0))
    for norm_type, expected in ((1.0, 192.0), (2.0, math.sqrt(192)), (0.0, 192.0), (INF, 1.0)):
        total = gradclip.get_total_norm([cases.gradient(owner)], norm_type, dtype=torch.float64)
        assert total.item() == expected


def test_copies_on_one_stage_and_shards_on_the_other(four: World) -> None:
    four.run(one_stage_copies)
