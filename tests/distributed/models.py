"""Small models under torch's real parallelism, with gradients from a real backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WIDTH, HIDDEN = 8, 12


class Block(nn.Module):
    """Two linear layers between two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.out = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.down(torch.relu(self.up(self.norm(x)))))  # type: ignore[no-any-return]


TENSOR_PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SEQUENCE_PLAN = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
    "out": SequenceParallel(),
}


def block(seed: int = 0, dtype: torch.dtype = torch.float32) -> Block:
    """The same block on every rank."""
    torch.manual_seed(seed)
    return Block().to(dtype)


def inputs(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.Generator().manual_seed(9)
    return torch.randn(2, 8, WIDTH, generator=made).to(dtype)


def backward(model: nn.Module, x: torch.Tensor) -> list[Any]:
    """Gradients from a loss; the parameters in order."""
    y = model(x)
    if isinstance(y, DTensor):
        y = y.redistribute(placements=[Replicate()] * y.device_mesh.ndim).to_local()
    (y.square() * torch.arange(1, 1 + WIDTH).to(y.dtype)).sum().backward()
    return list(model.parameters())


def sharded(mesh: DeviceMesh, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Any]:
    """FSDP2 over `mesh` (2-D: replicas of shards)."""
    model = block(seed, dtype)
    fully_shard(model, mesh=mesh)
    return backward(model, inputs(dtype))


def mixed(mesh: DeviceMesh) -> list[Any]:
    """FSDP2 with bfloat16 linear layers and float32 norms."""
    model = block()
    model.up.to(torch.bfloat16)
    model.down.to(torch.bfloat16)
    for layer in (model.norm, model.up, model.down, model.out):
        fully_shard(layer, mesh=mesh)
    model.norm.register_forward_hook(lambda _m, _i, y: y.bfloat16())
    model.down.register_forward_hook(lambda _m, _i, y: y.float())
    return backward(model, inputs())


def tensor_parallel(mesh: DeviceMesh, seed: int = 0) -> list[Any]:
    """Column and row parallel linear layers; plain norms."""
    model = block(seed)
    parallelize_module(model, mesh, TENSOR_PLAN)
    return backward(model, inputs())


def sequence_parallel(mesh: DeviceMesh) -> list[Any]:
    """Column, row and sequence parallel: the norms' gradients are partial sums."""
    model = block()
    parallelize_module(model, mesh, SEQUENCE_PLAN)
    return backward(model, distribute_tensor(inputs(), mesh, [Shard(1)]))


def sharded_tensor_parallel(data: DeviceMesh, tensor: DeviceMesh, seed: int = 0) -> list[Any]:
    """FSDP2 around tensor parallel: strided shards, and norms on the data mesh alone."""
    model = block(seed)
    parallelize_module(model, tensor, TENSOR_PLAN)
    fully_shard(model, mesh=data)
    return backward(model, inputs())


def sharded_sequence_parallel(data: DeviceMesh, tensor: DeviceMesh) -> list[Any]:
    """FSDP2 around sequence parallel."""
    model = block()
    parallelize_module(model, tensor, SEQUENCE_PLAN)
    fully_shard(model, mesh=data)
    return backward(model, distribute_tensor(inputs(), tensor, [Shard(1)]))
