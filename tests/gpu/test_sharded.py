"""The clip over ranks on a GPU, with one rank: everything but the wire (see benches/nccl)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import gradclip
from gradclip.sharding import ShardedClipError
from tests import oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    torch.cuda.set_device(CUDA)
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def parameter(full: torch.Tensor, on: DeviceMesh) -> torch.nn.Parameter:
    owner = torch.nn.Parameter(distribute_tensor(torch.zeros_like(full), on, [Shard(0)]))
    owner.grad = distribute_tensor(full.clone(), on, [Shard(0)])
    return owner


def local(owner: torch.nn.Parameter) -> torch.Tensor:
    found: Any = owner.grad
    return torch.as_tensor(found._local_tensor)


def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    shapes = ((300, 70), (5,), (1000,))
    return [torch.randn(shape, generator=made).to(dtype).to(CUDA) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("norm_type", [0.0, 1.0, 2.0, math.inf, -math.inf])
def test_nobody_waits_and_the_bits_are_the_oracles(
    mesh: DeviceMesh, dtype: torch.dtype, norm_type: float
) -> None:
    full = gradients(dtype)
    owners = [parameter(g, mesh) for g in full]
    expected = oracle.total_norm(full, norm_type)
    clipper = gradclip.Clipper(owners, 0.5 * expected, norm_type, dtype=torch.float64)
    clipper.max_norm = math.inf
    assert clipper.clip_().item() == expected
    clipper.clip_()
    clipper.max_norm = 0.5 * expected
    torch.cuda.set_sync_debug_mode("error")
    try:
        total = clipper.clip_()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert total.item() == expected
    assert clipper.coefficient is not None
    assert float(clipper.coefficient) == oracle.coefficient(expected, 0.5 * expected)
    for owner, was in zip(owners, full, strict=True):
        wanted = oracle.clipped(was.cpu(), expected, 0.5 * expected)
        assert torch.equal(local(owner).cpu(), wanted)
    clipper.check()


def test_a_graph_holds_the_whole_clip(mesh: DeviceMesh) -> None:
    full = gradients(torch.bfloat16)
    owners = [parameter(g, mesh) for g in full]
    clipper = gradclip.Clipper(owners, 1.0, dtype=torch.float64)
    for _ in range(3):
        for owner, values in zip(owners, full, strict=True):
            local(owner).copy_(values)
        clipper.clip_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = clipper.clip_()
    for _ in range(3):
        for owner, values in zip(owners, full, strict=True):
            local(owner).copy_(values)
        graph.replay()
    torch.cuda.synchronize()
    expected = oracle.total_norm(full, 2.0)
    assert total.item() == expected
    for owner, was in zip(owners, full, strict=True):
        assert torch.equal(local(owner).cpu(), oracle.clipped(was.cpu(), expected, 1.0))


def test_an_error_leaves_the_gradients_alone(mesh: DeviceMesh) -> None:
    owners = [parameter(g, mesh) for g in gradients(torch.float32)]
    clipper = gradclip.Clipper(owners, 1.0)
    clipper.clip_()
    clipper.max_norm = 0.5
    clipper.clip_()
    kept = [local(owner).clone() for owner in owners]
    base = torch.ones(100, device=CUDA)
    other: Any = owners[0].grad
    mine, other._local_tensor = other._local_tensor, base[:60]
    third: Any = owners[1].grad
    third_local, third._local_tensor = third._local_tensor, base[50:55]
    clipper.max_norm = 0.1
    with pytest.raises(ShardedClipError, match="rank 0"):
        clipper.clip_()
    assert bool((base == 1).all())
    other._local_tensor, third._local_tensor = mine, third_local
    for owner, was in zip(owners, kept, strict=True):
        assert torch.equal(local(owner), was)
    assert math.isfinite(clipper.clip_().item())


def test_offloaded_gradients_beside_a_group_of_the_device(mesh: DeviceMesh) -> None:
    full = [g.cpu() for g in gradients(torch.float32)]
    owners = []
    for g in full:
        placed: Any = distribute_tensor(g.to(CUDA), mesh, [Shard(0)])
        owner = torch.nn.Parameter(DTensor(torch.zeros_like(g), placed._spec, requires_grad=False))
        owner.grad = DTensor(g.clone(), placed._spec, requires_grad=False)
        owners.append(owner)
    total = gradclip.clip_(owners, 0.5, dtype=torch.float64)
    expected = oracle.total_norm(full, 2.0)
    assert total.item() == expected
    for owner, was in zip(owners, full, strict=True):
        assert torch.equal(local(owner), oracle.clipped(was, expected, 0.5))
