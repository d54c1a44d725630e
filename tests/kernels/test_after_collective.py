"""Sums of several ranks, added up elsewhere: a launch without chunks carries and finishes them."""

from __future__ import annotations

import math

import pytest
import torch

from tests import oracle
from tests.kernels import launch

EXTREME = 141
KINDS = {0.0: "count", 1.0: "sums_1", 2.0: "sums_2", math.inf: "max", -math.inf: "min"}


def collected(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """What one rank sends: its carried sums."""
    then = launch.NOTHING.value + 1
    return launch.sums(kind, tensor.dtype, [launch.segment(tensor)], then=then).output.clone()


def added(parts: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """What the all-reduce gives: sums without carries, or maxima."""
    if math.isinf(norm_type):
        return torch.stack(parts).amax(0)
    total = torch.stack(parts).sum(0)
    total[EXTREME] = launch.NONE
    return total


@pytest.mark.parametrize("norm_type", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_finish_of_reduced_sums(norm_type: float, ranks: int) -> None:
    made = torch.Generator().manual_seed(ranks)
    gradients = [torch.randn(40 + k, generator=made) * 2.0 ** (k * 9) for k in range(ranks)]
    kind = KINDS[norm_type]
    reduced = added([collected(g, kind) for g in gradients], norm_type)
    space = launch.Workspace()
    space.stripes[: reduced.numel()] = reduced
    space.stripes[EXTREME] ^= launch.NONE
    launch.sums(kind, torch.float32, [], grid=1, max_norm=0.5, loss_scale=2.0, workspace=space)
    expected = oracle.total_norm(gradients, norm_type)
    expected = expected if norm_type == 0 else expected / 2
    assert space.total == expected
    assert space.coefficient == oracle.coefficient(expected, 0.5)
    assert float(space.result[2]) == space.coefficient / 2
    assert space.is_clean()
