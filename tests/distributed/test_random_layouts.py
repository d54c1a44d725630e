"""Random meshes, placements, shapes and dtypes: one total, whoever holds what."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import gradclip
from tests.distributed import cases
from tests.distributed.world import World

pytestmark = pytest.mark.distributed

MESHES = {
    4: [(4,), (2, 2), (4, 1), (1, 4)],
    8: [(8,), (2, 4), (4, 2), (2, 2, 2), (1, 8)],
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def tensor(choose: random.Random, made: torch.Generator) -> torch.Tensor:
    shape = [choose.choice([1, 2, 3, 7, 16]) for _ in range(choose.randint(1, 3))]
    values = torch.randn(shape, generator=made, dtype=torch.float64)
    values *= 2.0 ** choose.randint(-12, 3)
    return values.to(choose.choice(DTYPES))


def placed(choose: random.Random, full: torch.Tensor, mesh: Any) -> torch.nn.Parameter:
    """A parameter on the mesh or a slice of it, sharded and copied at random."""
    names = mesh.mesh_dim_names
    kept = sorted(choose.sample(range(len(names)), choose.randint(1, len(names))))
    part = mesh[tuple(names[k] for k in kept)]
    where = [choose.choice([Replicate(), Shard(choose.randrange(full.dim()))]) for _ in kept]
    return cases.parameter(full, part, *where)


def models(rank: int, size: int, seed: int) -> None:
    choose, made = random.Random(seed), torch.Generator().manual_seed(seed)
    meshes = [cases.mesh(*shape) for shape in MESHES[size]]
    for _ in range(6):
        full = [tensor(choose, made) for _ in range(choose.randint(1, 8))]
        owners = [placed(choose, g, choose.choice(meshes)) for g in full]
        if choose.random() < 0.5:
            full.append(tensor(choose, made))
            owners.append(cases.parameter(full[-1]))
        for norm_type in (*cases.NORM_TYPES, 0.0, -math.inf):
            total = gradclip.clip_(owners, math.inf, norm_type, dtype=torch.float64)
            alone = gradclip.get_total_norm(full, norm_type, dtype=torch.float64)
            assert total.item() == alone.item(), (seed, norm_type)
            each = gradclip.grad_norms(owners, norm_type, dtype=torch.float64)
            wanted = gradclip.grad_norms(full, norm_type, grad="data", dtype=torch.float64)
            assert torch.equal(each, wanted), (seed, norm_type)
        cases.check_clip(owners, full, 2.0)


@pytest.mark.parametrize("seed", range(4))
def test_random_models(four: World, eight: World, seed: int) -> None:
    for world in (four, eight):
        world.run(models, world.size, seed)
