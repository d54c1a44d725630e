"""What the tests over several ranks build and check; runs inside the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, distribute_tensor

import gradclip
from tests import oracle

NORM_TYPES = (1.0, 2.0, 3.0, math.inf)


def mesh(*shape: int, names: str | None = None) -> DeviceMesh:
    """A CPU mesh; `names` are one word a dimension."""
    labels = tuple(names.split()) if names else tuple(f"d{k}" for k in range(len(shape)))
    return init_device_mesh("cpu", shape, mesh_dim_names=labels)


def gradients(*shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """The same Gaussian gradients on every rank."""
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=made).to(dtype) for shape in shapes]


def parameter(
    full: torch.Tensor, on: DeviceMesh | None = None, *where: Placement
) -> torch.nn.Parameter:
    """A parameter whose gradient is `full`, sharded as told (plain without a mesh)."""
    if on is None:
        owner = torch.nn.Parameter(torch.zeros_like(full))
        owner.grad = full.clone()
        return owner
    owner = torch.nn.Parameter(distribute_tensor(torch.zeros_like(full), on, list(where)))
    owner.grad = distribute_tensor(full.clone(), on, list(where))
    return owner


def gradient(owner: torch.nn.Parameter) -> Any:
    assert owner.grad is not None
    return owner.grad


def local(owner: torch.nn.Parameter) -> torch.Tensor:
    """The local part of a gradient, itself."""
    return local_of(owner.grad)


def local_of(tensor: Any) -> torch.Tensor:
    """The local part of a tensor, itself."""
    return torch.as_tensor(getattr(tensor, "_local_tensor", tensor))


def whole(owner: torch.nn.Parameter) -> torch.Tensor:
    """The full gradient, gathered, on every rank."""
    found = gradient(owner)
    if not hasattr(found, "device_mesh"):
        return torch.as_tensor(found)
    placed = [p if not isinstance(p, Partial) else Replicate() for p in found.placements]
    return torch.as_tensor(found.redistribute(placements=placed).full_tensor())


@contextmanager
def counted_calls() -> Iterator[list[str]]:
    """The names of the torch.distributed collectives that are called."""
    calls: list[str] = []
    names = [
        "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all",
        "barrier", "broadcast", "broadcast_object_list", "gather", "recv", "reduce",
        "reduce_scatter", "reduce_scatter_tensor", "scatter", "send", "new_group",
    ]  # fmt: skip
    originals = {name: getattr(dist, name) for name in names}

    def counting(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            calls.append(name)
            return originals[name](*arguments, **named)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def one_process_norm(full: Sequence[torch.Tensor], norm_type: float) -> float:
    """The exact norm of plain tensors here; of gradclip for p = 3, which is exact within an ulp."""
    alone = gradclip.get_total_norm(list(full), norm_type, dtype=torch.float64).item()
    if norm_type in (1.0, 2.0, math.inf):
        assert alone == oracle.total_norm(full, norm_type)
    return alone


def check_clip(
    parameters: Sequence[torch.nn.Parameter],
    full: Sequence[torch.Tensor],
    norm_type: float,
    fraction: float = 0.5,
    buckets: int = 0,
    **sharding: Any,
) -> float:
    """Clip to a fraction of the norm; everything that must hold of the result.

    `buckets` is how many reduce-scatters of partial gradients follow the one all-reduce, with one
    more all-reduce for their sums.

    `full` are the logical gradients of the whole model, each once, from every rank's view the same.
    The local gradients of `parameters` must become the oracle's, their norm must be the limit.
    """
    expected = one_process_norm(full, norm_type)
    limit = fraction * expected
    before = [local(p).clone() for p in parameters]
    for _ in range(2):  # replicas are compared, by one more all-reduce when p = inf
        gradclip.clip_(parameters, math.inf, norm_type, **sharding)
    with counted_calls() as calls:
        total = gradclip.clip_(parameters, limit, norm_type, dtype=torch.float64, **sharding)
    assert type(total) is torch.Tensor
    assert total.item() == expected, (total.item(), expected)
    pending = ["reduce_scatter_tensor"] * buckets + ["all_reduce"] if buckets else []
    assert calls == ["all_reduce", *pending], calls
    for owner, was in zip(parameters, before, strict=True):
        wanted = oracle.clipped(was, expected, limit)
        assert torch.equal(local(owner), wanted), (local(owner), wanted)
        assert was.numel() == 0 or not was.any() or not torch.equal(local(owner), was)
    after = gradclip.get_total_norm(
        [gradient(p) for p in parameters], norm_type, dtype=torch.float64, **sharding
    )
    narrow = any(t.dtype in (torch.bfloat16, torch.float16) for t in full)
    assert after.item() <= limit * (1 + 2**-8 if narrow else 1), (after.item(), limit)
    return float(total)


def again(owners: Sequence[Any], check: Callable[[float], object]) -> None:
    """Runs a check for each norm type on the same gradients."""
    kept = [local(owner).clone() for owner in owners]
    for norm_type in NORM_TYPES:
        check(norm_type)
        for owner, values in zip(owners, kept, strict=True):
            local(owner).copy_(values)


def check_model(owners: Sequence[Any], buckets: int = 0, **sharding: Any) -> None:
    """`check_clip` of a model for each norm type."""
    full = [whole(owner) for owner in owners]
    again(owners, lambda p: check_clip(owners, full, p, buckets=buckets, **sharding))
