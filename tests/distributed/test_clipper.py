"""The clipper that is set up once, what `explain` says, and what a clip reads and allocates."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import gradclip
from gradclip.sharding import session
from tests import oracle
from tests.distributed import cases, models
from tests.distributed.world import World
from tests.gradients import parameters
from tests.test_memory import MEGABYTE, peak_growth, peak_of_torch


def test_alone_it_clips_as_the_function_does() -> None:
    values = [torch.tensor([3.0, -4.0]), torch.tensor([12.0])]
    owners = parameters([v.clone() for v in values])
    clipper = gradclip.Clipper(owners, 6.5, dtype=torch.float64, eps=0.0)
    total = clipper.clip_()
    assert total.item() == 13.0
    assert clipper.total_norm is total
    assert clipper.coefficient == 0.5
    assert [o.grad.tolist() for o in owners if o.grad is not None] == [[1.5, -2.0], [6.0]]
    clipper.max_norm = math.inf
    assert clipper().item() == 6.5
    assert clipper.coefficient == 1.0
    assert clipper(max_norm=1.0).item() == 6.5
    others = parameters([torch.tensor([2.0])])
    assert clipper(others, 1.0).item() == 2.0
    assert clipper(iter(others)).item() == 1.0


def test_a_loss_scale_is_divided_out() -> None:
    owners = parameters([torch.tensor([30.0, -40.0])])
    clipper = gradclip.Clipper(owners, 2.5, eps=0.0)
    assert clipper.clip_(scale=10.0).item() == 5.0
    assert owners[0].grad is not None
    assert owners[0].grad.tolist() == [1.5, -2.0]


def test_a_clipper_refuses_what_the_function_refuses() -> None:
    owners = parameters([torch.ones(2)])
    with pytest.raises(ValueError, match="`max_norm` is -1"):
        gradclip.Clipper(owners, -1.0)
    clipper = gradclip.Clipper(owners, 1.0)
    clipper.max_norm = math.nan
    with pytest.raises(ValueError, match="`max_norm` is nan"):
        clipper.clip_()
    with pytest.raises(TypeError, match="unknown argument `grop`"):
        gradclip.Clipper(owners, 1.0, grop=None)  # type: ignore[arg-type]


def test_without_gradients_it_warns() -> None:
    owner = nn.Parameter(torch.ones(2))
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        assert gradclip.Clipper([owner], 1.0).clip_().item() == 0.0


def steps(rank: int) -> None:
    """Training steps with a changing set of gradients, the coefficient on every rank alike."""
    both = cases.mesh(2, 2, names="dp tp")
    model = models.block()
    owners = models.sharded_tensor_parallel(both["dp"], both["tp"])
    clipper = gradclip.Clipper([(f"w{k}", o) for k, o in enumerate(owners)], 0.25)
    kept = [owner.grad for owner in owners]
    for step in range(4):
        for k, owner in enumerate(owners):
            owner.grad = None if k % 4 == step else kept[k]
        full = [cases.whole(owner) for owner in owners if owner.grad is not None]
        before = [cases.local(owner).clone() for owner in owners if owner.grad is not None]
        with cases.counted_calls() as calls:
            clipper.clip_()
        assert calls == ["all_reduce"]
        expected = oracle.total_norm(full, 2.0)
        assert clipper.coefficient == oracle.coefficient(expected, 0.25)
        present = [owner for owner in owners if owner.grad is not None]
        for owner, was in zip(present, before, strict=True):
            assert torch.equal(cases.local(owner), oracle.clipped(was, expected, 0.25))
    del model


@pytest.mark.distributed
def test_steps_of_a_sharded_model(four: World) -> None:
    four.run(steps)


def explained(rank: int) -> Any:
    both = cases.mesh(2, 2, names="dp tp")
    named = [
        ("weight", cases.parameter(torch.ones(6, 2), both, Replicate(), Shard(0))),
        ("bias", cases.parameter(torch.ones(5), both["dp"], Replicate())),
        ("norm", cases.parameter(torch.ones(4))),
        ("scale", cases.parameter(torch.ones(4), both["tp"], Replicate())),
    ]
    pending = named[3][1]
    pending.grad = DTensor.from_local(torch.ones(4), both["tp"], [Partial()], run_check=False)
    with cases.counted_calls() as calls:
        explanation = gradclip.explain(named)
    assert calls == []
    return str(explanation), explanation.shares


@pytest.mark.distributed
def test_explain_tells_who_counts_what(four: World) -> None:
    answers = four.run(explained)
    text, _ = answers[0]
    for word in ("placements", "copies", "counted", "reason", "weight", "replica over 2"):
        assert word in text
    counted = {row.parameter: [] for row in answers[0][1]}  # type: ignore[var-annotated]
    for _, shares in answers:
        for row in shares:
            counted[row.parameter].append((row.copies, row.counted))
    assert counted["weight"] == [
        ("1 of 2", "0:3 of 6"),
        ("1 of 2", "0:3 of 6"),
        ("2 of 2", "3:6 of 6"),
        ("2 of 2", "3:6 of 6"),
    ]
    assert [slice_ for _, slice_ in counted["norm"]] == [
        "0:1 of 4",
        "1:2 of 4",
        "2:3 of 4",
        "3:4 of 4",
    ]
    assert {slice_ for _, slice_ in counted["scale"]} == {"its reduced piece"}
    assert sorted(slice_ for _, slice_ in counted["bias"]) == [
        "0:1 of 5",
        "1:2 of 5",
        "2:3 of 5",
        "3:5 of 5",
    ]


def half_read(rank: int) -> tuple[int, int]:
    """Elements that this rank reads of an HSDP model, and elements that it holds."""
    owners = models.sharded(cases.mesh(2, 2, names="replicate shard"))
    held = sum(cases.local(owner).numel() for owner in owners)
    read = 0
    for row in gradclip.explain(owners).shares:
        start, stop = row.counted.split(" ")[0].split(":")
        read += int(stop) - int(start)
    return read, held


@pytest.mark.distributed
def test_copies_share_the_reading(four: World) -> None:
    answers = four.run(half_read)
    for read, held in answers:
        assert abs(read - held / 2) <= 8  # one odd element a parameter
    assert sum(read for read, _ in answers) == sum(held for _, held in answers) / 2


def memory(rank: int) -> tuple[int, int]:
    """Peak of torch's allocations and growth of the process while clipping 32 MB a rank."""
    both = cases.mesh(2, 2, names="dp tp")
    owners = [
        cases.parameter(torch.ones(2048, 2048), both, Shard(0), Shard(1)) for _ in range(4)
    ] + [cases.parameter(torch.ones(1024, 1024), both["tp"], Replicate()) for _ in range(4)]
    clipper = gradclip.Clipper(owners, 1.0)
    clipper.clip_()
    clipper.max_norm = 0.5
    gc.collect()
    with peak_growth() as growth:
        clipper.clip_()
    assert clipper.coefficient is not None
    assert clipper.coefficient < 1
    clipper.max_norm = 0.25
    return peak_of_torch(clipper.clip_), growth[0]


@pytest.mark.distributed
def test_memory_does_not_grow_with_the_gradients(four: World) -> None:
    for torch_peak, growth in four.run(memory):
        assert torch_peak < MEGABYTE // 8
        assert growth < MEGABYTE


def released(rank: int) -> None:
    """Kept sessions hold no parameter alive."""
    line = cases.mesh(2)
    owner = cases.parameter(torch.ones(4), line, Shard(0))
    gone = weakref.ref(owner)
    gradclip.clip_([owner], 1.0)
    assert len(session._sessions) > 0
    del owner
    gc.collect()
    assert gone() is None


@pytest.mark.distributed
def test_sessions_hold_no_parameter_alive(two: World) -> None:
    two.run(released)


def given_by_module(rank: int) -> None:
    """A module names its parameters; the group may be a part of the world."""
    both = cases.mesh(2, 2, names="dp tp")
    model = models.block()
    parallelize_module(model, both["tp"], models.TENSOR_PLAN)
    models.backward(model, models.inputs())
    full = [cases.whole(owner) for owner in model.parameters()]
    expected = oracle.total_norm(full, 2.0)
    clipper = gradclip.Clipper(model, math.inf, group=both.get_group("tp"), dtype=torch.float64)
    assert clipper.clip_().item() == expected
    assert gradclip.Clipper(model, math.inf, dtype=torch.float64).clip_().item() == expected
    assert dist.is_initialized()


@pytest.mark.distributed
def test_a_module_and_a_part_of_the_world(four: World) -> None:
    four.run(given_by_module)


def followed(rank: int) -> None:
    """A sharded model that gets other parameters and a layer more, on all ranks alike."""
    line = cases.mesh(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for layer in model:
        parallelize_module(layer, line, ColwiseParallel())
    clipper = gradclip.Clipper(model, 0.25, dtype=torch.float64)

    def step(value: float) -> None:
        for owner in model.parameters():
            owner.grad = torch.full_like(owner, value)
        with cases.counted_calls() as calls:
            total = clipper.clip_()
        assert calls == ["all_reduce"]
        count = sum(owner.numel() for owner in model.parameters())
        expected = oracle.total_norm([torch.full((count,), value)])
        assert total.item() == expected
        wanted = oracle.clipped(torch.full((1,), value), expected, 0.25)
        for owner in model.parameters():
            assert bool((cases.local(owner) == wanted).all())

    step(3.0)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    step(5.0)
    model.append(nn.Linear(2, 2))
    parallelize_module(model[2], line, ColwiseParallel())
    step(7.0)
    step(7.0)


@pytest.mark.distributed
def test_a_sharded_module_is_followed(two: World) -> None:
    two.run(followed)
