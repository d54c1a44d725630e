"""A decoder made on the spot, sharded in four ways, whose gradients every rank can also hold whole.

Nothing is trained: the parameters are filled with seeded numbers before they are sharded, and each
parameter's gradient is a copy of its own shard. So the whole gradients are known without gathering.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


@dataclass(frozen=True)
class Sizes:
    """Width, inner width, layers and vocabulary."""

    width: int
    inner: int
    layers: int
    vocabulary: int


#: About 1.36 billion parameters.
LARGE = Sizes(2048, 5632, 24, 32000)
#: For a trial on the CPU.
SMALL = Sizes(64, 160, 3, 500)

TENSOR_PLAN = {
    "query": ColwiseParallel(),
    "key": ColwiseParallel(),
    "value": ColwiseParallel(),
    "out": RowwiseParallel(),
    "gate": ColwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


class Layer(nn.Module):
    """The parameters of one decoder layer; bfloat16 matrices, float32 norms."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, inner = sizes.width, sizes.inner
        for name in ("query", "key", "value", "out"):
            setattr(self, name, _linear(width, width))
        self.gate, self.up = _linear(width, inner), _linear(width, inner)
        self.down = _linear(inner, width)
        self.before, self.after = nn.RMSNorm(width), nn.RMSNorm(width)


class Decoder(nn.Module):
    """The parameters of a decoder."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)


def decoder(sizes: Sizes, device: torch.device) -> Decoder:
    """The same decoder on every rank, filled with gradient-like numbers."""
    with torch.device("meta"):
        model = Decoder(sizes)
    model.to_empty(device=device)
    numbers = torch.Generator(device).manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.01, generator=numbers)
    return model


def fsdp(model: Decoder, device: str, size: int) -> None:
    """FSDP2 over all ranks."""
    _fully_shard(model, init_device_mesh(device, (size,), mesh_dim_names=("dp",)))


def offloaded(model: Decoder, device: str, size: int) -> None:
    """FSDP2 with parameters and gradients on the CPU, beside a group of the device."""
    mesh = init_device_mesh(device, (size,), mesh_dim_names=("dp",))
    _fully_shard(model, mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))


def hsdp(model: Decoder, device: str, size: int) -> None:
    """Replicas of shards, as few as divide the ranks."""
    few = _fewest(size)
    names = ("replicate", "shard")
    _fully_shard(model, init_device_mesh(device, (few, size // few), mesh_dim_names=names))


def tensor(model: Decoder, device: str, size: int) -> None:
    """Tensor parallel over all ranks; embedding and norms stay plain."""
    _tensor_parallel(model, init_device_mesh(device, (size,), mesh_dim_names=("tp",)))


def tensor_fsdp(model: Decoder, device: str, size: int) -> None:
    """Tensor parallel over as few ranks as divide all, inside FSDP2 over the rest."""
    few = _fewest(size)
    mesh = init_device_mesh(device, (size // few, few), mesh_dim_names=("dp", "tp"))
    _tensor_parallel(model, mesh["tp"])
    _fully_shard(model, mesh["dp"])


LAYOUTS: dict[str, Callable[[Decoder, str, int], None]] = {
    "FSDP2": fsdp,
    "HSDP": hsdp,
    "TP, plain norms": tensor,
    "TP x FSDP2": tensor_fsdp,
}


def with_gradients(model: Decoder) -> list[tuple[str, nn.Parameter]]:
    """Named parameters, each with a copy of itself as its gradient."""
    named = list(model.named_parameters())
    for _, parameter in named:
        values: Any = parameter.detach()
        if isinstance(values, DTensor):
            local = values._local_tensor.clone()
            # as FSDP2 makes them: `from_local` would move an offloaded shard to the mesh's device
            parameter.grad = DTensor(local, values._spec, requires_grad=False)
        else:
            parameter.grad = values.clone()
    return named


def _fewest(size: int) -> int:
    """The smallest number from 2 up that divides a size; two for all even ones."""
    return next(few for few in range(2, size + 1) if size % few == 0)


def _tensor_parallel(model: Decoder, mesh: Any) -> None:
    for layer in model.layers:
        parallelize_module(layer, mesh, dict(TENSOR_PLAN))


def _fully_shard(model: Decoder, mesh: Any, **more: Any) -> None:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **more)
    fully_shard(model, mesh=mesh, **more)
