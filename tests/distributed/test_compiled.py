"""Sharded gradients under torch.compile: the call leaves the graph and gives the eager bits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import gradclip
from tests import oracle
from tests.distributed.world import World
from tests.gradients import random_values

pytestmark = pytest.mark.distributed

BACKENDS = ["eager", "aot_eager", "inductor"]
Owners = list[torch.nn.Parameter]


def sharded() -> Owners:
    """Parameters whose gradients are sharded, replicated and pending; one has no gradient."""
    mesh = init_device_mesh("cpu", (2,))
    owners = []
    for seed, placement in enumerate((Shard(0), Replicate(), Shard(1), None)):
        value = random_values((5, 3), torch.float32, seed=seed)
        at = [placement or Shard(0)]
        owner = torch.nn.Parameter(distribute_tensor(torch.zeros(5, 3), mesh, at))
        owner.grad = None if placement is None else distribute_tensor(value, mesh, at)
        owners.append(owner)
    return owners


def pending() -> Owners:
    mesh = init_device_mesh("cpu", (2,))
    owner = torch.nn.Parameter(distribute_tensor(torch.zeros(5, 3), mesh, [Replicate()]))
    local = random_values((5, 3), torch.float32, seed=7 + dist.get_rank())
    owner.grad = DTensor.from_local(local, mesh, [Partial()])
    return [owner, *sharded()]


def plain() -> Owners:
    owner = torch.nn.Parameter(torch.zeros(4))
    owner.grad = random_values(4, torch.float32, seed=11 + dist.get_rank())
    return [owner]


def two_calls(owners: Owners, limit: float) -> Any:
    norm = gradclip.get_total_norm([owner.grad for owner in owners if owner.grad is not None])
    gradclip.clip_grads_with_norm_(owners, limit, norm)
    return norm


def in_the_group(owners: Owners, limit: float) -> Any:
    return gradclip.clip_(owners, limit, group=dist.group.WORLD)


def raw_scale(owners: Owners, limit: float) -> None:
    gradclip.scale_([owner.grad for owner in owners if owner.grad is not None], limit)


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], Owners]]] = {
    "clip_": (lambda o, limit: gradclip.clip_(o, limit), sharded),
    "clip_ of pending sums": (lambda o, limit: gradclip.clip_(o, limit), pending),
    "clip_grad_norm_": (lambda o, limit: gradclip.clip_grad_norm_(o, limit, 1.0), sharded),
    "named pairs": (lambda o, limit: gradclip.clip_([("w", p) for p in o], limit), sharded),
    "a generator": (lambda o, limit: gradclip.clip_((p for p in o), limit), sharded),
    "norm and scale": (two_calls, sharded),
    "clip_grad_value_": (lambda o, limit: gradclip.clip_grad_value_(o, limit), sharded),
    "grad_norms": (lambda o, limit: gradclip.grad_norms(o, limit), sharded),
    "scale_": (raw_scale, sharded),
    "group=": (in_the_group, plain),
}


def local(gradient: Any) -> torch.Tensor | None:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def compare(rank: int, name: str, backend: str) -> None:
    torch._dynamo.reset()
    call, make = CALLS[name]
    graphed = torch.compile(call, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for limit in (0.5, 0.25, 1.5, 2.5, 3.0):
            eager, compiled = make(), make()
            want, result = call(eager, limit), graphed(compiled, limit)
            assert (want is None) == (result is None)
            assert want is None or oracle.same_bits(result, want)
            for ours, other in zip(compiled, eager, strict=True):
                mine, yours = local(ours.grad), local(other.grad)
                assert (mine is None) == (yours is None)
                assert mine is None or yours is None or oracle.same_bits(mine, yours)


@pytest.mark.parametrize("backend", BACKENDS[:2])
@pytest.mark.parametrize("name", CALLS)
def test_compiled_calls_give_the_eager_bits(name: str, backend: str, two: World) -> None:
    two.run(compare, name, backend)


def clip_by_a_clipper(rank: int, backend: str) -> None:
    torch._dynamo.reset()
    eager, compiled = sharded(), sharded()
    ours, other = gradclip.Clipper(compiled, 1.0), gradclip.Clipper(eager, 1.0)
    graphed = torch.compile(lambda scale: ours.clip_(scale), backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(5):
            ours.max_norm = other.max_norm = 4.0 - step / 2
            assert oracle.same_bits(graphed(1.5 + step), other.clip_(1.5 + step))
            assert ours.coefficient == other.coefficient
    for mine, yours in zip(compiled, eager, strict=True):
        one, two = local(mine.grad), local(yours.grad)
        assert one is None or two is None or oracle.same_bits(one, two)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_clipper(backend: str, two: World) -> None:
    two.run(clip_by_a_clipper, backend)


def refuse(rank: int, backend: str) -> None:
    """An error on one rank is raised on both, and no gradient has changed."""
    torch._dynamo.reset()
    owners = sharded()
    graphed = torch.compile(lambda o, limit: gradclip.clip_(o, limit), backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((ValueError, RuntimeError), match="max_norm"):
            graphed(owners, -1.0 if rank else 1.0)
    for owner, fresh in zip(owners, sharded(), strict=True):
        mine, want = local(owner.grad), local(fresh.grad)
        assert mine is None or want is None or oracle.same_bits(mine, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_of_one_rank(backend: str, two: World) -> None:
    two.run(refuse, backend)
