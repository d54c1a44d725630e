"""Meshes and groups as frameworks make them: islands, twins, flat shards, lists behind a hook."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import gradclip
from tests.distributed import cases
from tests.distributed.cases import gradients
from tests.distributed.world import World

pytestmark = pytest.mark.distributed

INF = math.inf


def flat_shards(rank: int) -> None:
    """ZeRO: each rank has a slice of one flat gradient; plain tensors and a group."""
    (flat,) = gradients((1001,))
    cuts = [0, 10, 500, 500, 1001]
    for norm_type in cases.NORM_TYPES:
        owner = cases.parameter(flat[cuts[rank] : cuts[rank + 1]])
        cases.check_clip([owner], [flat], norm_type, group=dist.group.WORLD)


def test_flat_shards_through_a_group(four: World) -> None:
    four.run(flat_shards)


def megatron_lists(rank: int) -> None:
    """Lists of main gradients, with the copies left out by the caller, through the hook."""
    (weight, norm) = gradients((8, 6), (6,))
    calls = []

    def reduce(vector: torch.Tensor, operation: str) -> None:
        assert vector.dtype == torch.int64
        assert vector.is_contiguous()
        calls.append(operation)
        kinds = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
        dist.all_reduce(vector, op=kinds[operation])

    for norm_type in cases.NORM_TYPES:
        owners = [cases.parameter(weight.chunk(2, dim=1)[rank])]
        owners += [cases.parameter(norm)] if rank == 0 else []
        for owner in owners:
            owner.main_grad, owner.grad = owner.grad, None  # type: ignore[attr-defined]
        calls.clear()
        total = gradclip.clip_(
            owners, 0.5, norm_type, dtype=torch.float64, grad="main_grad", reduce=reduce
        )
        assert total.item() == cases.one_process_norm([weight, norm], norm_type)
        assert calls == ["max" if norm_type == INF else "sum"]


def test_lists_of_gradients_through_a_hook(two: World) -> None:
    two.run(megatron_lists)


def islands(rank: int) -> None:
    """A mesh from `from_group` in a larger world: refused with the remedy, then settled."""
    world = cases.mesh(2, 2, names="dp tp")
    island = DeviceMesh.from_group(world.get_group("tp"), "cpu", mesh_dim_names=("tp",))
    (full,) = gradients((6, 3))
    owner = cases.parameter(full, island, Shard(0))
    with pytest.raises(ValueError, match="of a world of 4: pass group="):
        gradclip.clip_([("w", owner)], 1.0)
    with pytest.raises(gradclip.sharding.ShardedClipError, match=r'replicas=\{"w": "distinct"\}'):
        gradclip.clip_([("w", owner)], 1.0, group=dist.group.WORLD)
    said = {"w": world["dp"]}
    cases.check_clip([owner], [full], 2.0, group=dist.group.WORLD, replicas=lambda n, p: said["w"])
    owner = cases.parameter(full, island, Shard(0))
    cases.check_clip([owner], [full], 2.0, group=world.get_group("tp"))


def test_a_mesh_that_knows_no_root_is_refused(four: World) -> None:
    four.run(islands)


def outside(rank: int) -> None:
    """Ranks outside of a tensor's mesh take part and count nothing."""
    line, corner = cases.mesh(4), DeviceMesh("cpu", [0, 1])
    everywhere, there = gradients((5, 2), (6,))
    for norm_type in cases.NORM_TYPES:
        owners = [
            cases.parameter(everywhere, line, Shard(0)),
            cases.parameter(there, corner, Shard(0)),
        ]
        cases.check_clip(
            owners,
            [everywhere, there],
            norm_type,
            group=dist.group.WORLD,
            replicas=lambda name, p: "distinct" if p.device_mesh == corner else None,
        )


def test_ranks_outside_of_a_mesh(four: World) -> None:
    four.run(outside)


def twins(rank: int) -> None:
    """Equal meshes with different groups, and a flattened one, in one list."""
    one, other = cases.mesh(2, 2), cases.mesh(2, 2)
    assert one == other
    assert one.get_group(0) is not other.get_group(0)
    flat = one._flatten("flat")
    full = gradients((7, 3), (4, 4), (9,))
    for norm_type in cases.NORM_TYPES:
        owners = [
            cases.parameter(full[0], one, Replicate(), Shard(0)),
            cases.parameter(full[1], other, Shard(1), Shard(0)),
            cases.parameter(full[2], flat, Shard(0)),
        ]
        cases.check_clip(owners, full, norm_type)


def test_equal_meshes_and_a_flattened_one(four: World) -> None:
    four.run(twins)


def whole_meshes(rank: int) -> None:
    """A raw list of DTensors is distributed as it is; a module is named by its parameters."""
    line = cases.mesh(2)
    full = gradients((4, 3), (3,))
    tensors = [distribute_tensor(g, line, [Shard(0)]) for g in full]
    total = gradclip.get_total_norm(tensors, dtype=torch.float64)
    assert total.item() == cases.one_process_norm(full, 2.0)


def test_raw_gradients(two: World) -> None:
    two.run(whole_meshes)


def plain_alone(rank: int) -> None:
    """Plain gradients without a group are this process's own affair, as for torch."""
    owner = cases.parameter(torch.full((4,), 1.0 + rank))
    with cases.counted_calls() as calls:
        total = gradclip.clip_([owner], INF)
    assert calls == []
    assert total.item() == 2.0 * (1 + rank)
    other: Any = dist.new_group([0])
    if rank == 1:
        with pytest.raises(TypeError, match=r"expected a torch\.distributed process group"):
            gradclip.clip_([owner], INF, group=other)
    else:
        with cases.counted_calls() as calls:
            assert gradclip.clip_([owner], INF, group=other).item() == 2.0
        assert calls == [], "a group of one has nobody to ask"


def test_plain_gradients_alone(two: World) -> None:
    two.run(plain_alone)


def plain_owner(rank: int) -> None:
    """A DTensor gradient of a plain parameter: refused until the ranks are named."""
    line = cases.mesh(2)
    full = torch.tensor([3.0, 4.0])
    owner = torch.nn.Parameter(torch.zeros(2))
    owner.main_grad = distribute_tensor(full, line, [Shard(0)])  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="is a DTensor but its parameter is none; pass group="):
        gradclip.clip_([owner], 1.0, grad="main_grad")
    total = gradclip.clip_([owner], 1.0, grad="main_grad", group=dist.group.WORLD)
    assert total.item() == 5.0


def test_a_dtensor_gradient_of_a_plain_parameter(two: World) -> None:
    two.run(plain_owner)
