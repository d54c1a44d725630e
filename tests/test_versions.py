"""Autograd hears of every write: version counters move once, and stale graphs are refused."""

from collections.abc import Callable

import pytest
import torch

import gradclip
from tests.gradients import gradient_of, parameter, parameters

WRITES: dict[str, Callable[[list[torch.nn.Parameter]], object]] = {
    "clip_": lambda owners: gradclip.clip_(owners, 0.5),
    "clip_grad_norm_": lambda owners: gradclip.clip_grad_norm_(owners, 0.5),
    "clip_grads_with_norm_": lambda o: gradclip.clip_grads_with_norm_(o, 0.5, torch.tensor(5.0)),
    "clip_grad_value_": lambda owners: gradclip.clip_grad_value_(owners, 0.5),
    "scale_": lambda owners: gradclip.scale_(map(gradient_of, owners), 0.5),
}

READS: dict[str, Callable[[list[torch.nn.Parameter]], object]] = {
    "clip_ to inf": lambda owners: gradclip.clip_(owners, float("inf")),
    "get_total_norm": lambda owners: gradclip.get_total_norm(map(gradient_of, owners)),
    "grad_norms": lambda owners: gradclip.grad_norms(owners),
    "explain": lambda owners: gradclip.explain(owners),
    "scale_ by 1": lambda owners: gradclip.scale_(map(gradient_of, owners), 1.0),
}


def every_kind() -> list[torch.nn.Parameter]:
    return parameters(
        [
            torch.tensor([3.0, 4.0]),
            torch.ones(4, 6, dtype=torch.bfloat16)[:, ::2],
            torch.ones(4, 4, 4)[::2, ::2, ::2],
            torch.tensor(2.0).expand(3),
            torch.ones(3).to(torch.float8_e5m2),
        ]
    )


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_are_counted(
    write: Callable[[list[torch.nn.Parameter]], object], route: str
) -> None:
    owners = every_kind()
    before = [gradient_of(owner)._version for owner in owners]
    write(owners)
    after = [gradient_of(owner)._version for owner in owners]
    assert all(b > a for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_to_sparse_gradients_are_counted(
    write: Callable[[list[torch.nn.Parameter]], object],
) -> None:
    owner = parameter(torch.tensor([3.0, 4.0]).to_sparse())
    before = gradient_of(owner)._version
    write([owner])
    assert gradient_of(owner)._version > before


def test_the_engines_write_counts_once() -> None:
    owners = parameters([torch.tensor([3.0, 4.0]), torch.ones(3, dtype=torch.float64)])
    gradclip.clip_([*owners, owners[0]], 0.5)
    assert [gradient_of(owner)._version for owner in owners] == [1, 1]


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reads_are_no_writes(
    read: Callable[[list[torch.nn.Parameter]], object], route: str
) -> None:
    owners = every_kind()
    before = [gradient_of(owner)._version for owner in owners]
    read(owners)
    assert [gradient_of(owner)._version for owner in owners] == before


def test_a_graph_that_needs_the_old_gradient_is_refused(route: str) -> None:
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    (slope,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
    penalty = (slope**2).sum()
    weight.grad = slope.detach()
    gradclip.clip_([weight], 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_inside_a_graph_of_gradients(route: str) -> None:
    """Double backward leaves gradients that require grad; clipping them is no part of the graph."""
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    (weight**2).sum().backward(create_graph=True)
    norm = gradclip.clip_([weight], 5.0, eps=0.0)
    assert not norm.requires_grad
    assert gradient_of(weight).tolist() == [3.0, 4.0]
    weight.grad = None
