"""The total norm over ranks has the bits of the one-process exact norm, for every layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from tests.distributed import cases
from tests.distributed.world import World

pytestmark = pytest.mark.distributed


def gradients(*shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=made).to(dtype) for shape in shapes]


def one_mesh(rank: int, size: int, dtype: torch.dtype) -> None:
    full = gradients((7, 5), (11,), (1, 3), (64, 2), dtype=dtype)
    line = cases.mesh(size)
    for norm_type in cases.NORM_TYPES:
        owners = [cases.parameter(g, line, Shard(0)) for g in full]
        cases.check_clip(owners, full, norm_type)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_on_one_mesh(two: World, four: World, dtype: torch.dtype) -> None:
    for world in (two, four):
        world.run(one_mesh, world.size, dtype)
