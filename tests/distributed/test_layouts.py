"""The total norm over ranks has the bits of the one-process exact norm, for every layout."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from tests.distributed import cases, models
from tests.distributed.cases import check_model, gradients
from tests.distributed.world import World

pytestmark = pytest.mark.distributed


def one_mesh(rank: int, size: int, dtype: torch.dtype) -> None:
    full = gradients((7, 5), (11,), (1, 3), (64, 2), dtype=dtype)
    line = cases.mesh(size)
    for norm_type in cases.NORM_TYPES:
        owners = [cases.parameter(g, line, Shard(0)) for g in full]
        cases.check_clip(owners, full, norm_type)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_shards_on_one_mesh(two: World, four: World, dtype: torch.dtype) -> None:
    for world in (two, four):
        world.run(one_mesh, world.size, dtype)


def fsdp(rank: int, size: int, dtype: torch.dtype) -> None:
    check_model(models.sharded(cases.mesh(size), dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fsdp2(two: World, four: World, dtype: torch.dtype) -> None:
    for world in (two, four):
        world.run(fsdp, world.size, dtype)


def fsdp_mixed(rank: int, size: int) -> None:
    owners = models.mixed(cases.mesh(size))
    assert {owner.grad.dtype for owner in owners} == {torch.bfloat16, torch.float32}
    check_model(owners)


def test_fsdp2_of_mixed_dtypes(two: World) -> None:
    two.run(fsdp_mixed, 2)


def hsdp(rank: int) -> None:
    check_model(models.sharded(cases.mesh(2, 2, names="replicate shard")))


def test_hsdp(four: World) -> None:
    four.run(hsdp)


def tensor_parallel(rank: int, size: int) -> None:
    owners = models.tensor_parallel(cases.mesh(size, names="tp"))
    assert {isinstance(owner.grad, DTensor) for owner in owners} == {True, False}
    check_model(owners)


def test_tensor_parallel_with_plain_norms(two: World, four: World) -> None:
    for world in (two, four):
        world.run(tensor_parallel, world.size)


def sequence_parallel(rank: int) -> None:
    owners = models.sequence_parallel(cases.mesh(2, names="tp"))
    partial = [o for o in owners if any(p.is_partial() for p in o.grad.placements)]
    assert len(partial) >= 4
    check_model(owners, buckets=1)


def test_sequence_parallel_reduces_partial_gradients_in_one_bucket(two: World) -> None:
    two.run(sequence_parallel)


def replicated_data_parallel_tensor_parallel(rank: int) -> None:
    check_model(models.tensor_parallel(cases.mesh(2, 2, names="dp tp")["tp"]))


def test_tensor_parallel_inside_plain_data_parallel(four: World) -> None:
    four.run(replicated_data_parallel_tensor_parallel)


def fsdp_tp(rank: int) -> None:
    both = cases.mesh(2, 2, names="dp tp")
    owners = models.sharded_tensor_parallel(both["dp"], both["tp"])
    assert len({owner.grad.device_mesh.ndim for owner in owners}) == 2
    check_model(owners)


def test_fsdp2_and_tensor_parallel(four: World) -> None:
    four.run(fsdp_tp)


def fsdp_sp(rank: int) -> None:
    both = cases.mesh(2, 2, names="dp tp")
    check_model(models.sharded_sequence_parallel(both["dp"], both["tp"]))


def test_fsdp2_and_sequence_parallel(four: World) -> None:
    four.run(fsdp_sp)
