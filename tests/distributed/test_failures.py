"""What goes wrong on one rank is raised on all, in the same words, and leaves nothing behind."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

import gradclip
from gradclip.sharding import ShardedClipError
from tests.distributed import cases
from tests.distributed.world import World

pytestmark = pytest.mark.distributed

INF = math.inf


def raised(action: Callable[[], object]) -> str:
    """The words of the error that `action` raises; the same on every rank."""
    with pytest.raises(ShardedClipError) as error:
        action()
    words: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(words, str(error.value))
    assert len(set(words)) == 1, words
    return str(error.value)


def clip_of(*arguments: Any, **named: Any) -> Callable[[], object]:
    """The clip with these arguments, to be called later."""
    return lambda: gradclip.clip_(*arguments, **named)


def good_step() -> None:
    """A clip that must work after whatever came before."""
    full = torch.tensor([3.0, 0.0, 0.0, 4.0])
    owner = cases.parameter(full, cases.mesh(dist.get_world_size()), Shard(0))
    cases.check_clip([owner], [full], 2.0)


def nonfinite(rank: int, size: int) -> None:
    line = cases.mesh(size)
    for bad in (math.nan, INF, -INF):
        for where in range(size):
            for norm_type in (2.0, INF, 1.0):
                full = torch.arange(1.0, 1 + 2 * size)
                owner = cases.parameter(full, line, Shard(0))
                if rank == where:
                    cases.local(owner)[1] = bad
                before = cases.local(owner).clone()
                words = raised(clip_of([owner], 1.0, norm_type, error_if_nonfinite=True))
                assert "non-finite" in words
                assert torch.equal(cases.local(owner).nan_to_num(7.0), before.nan_to_num(7.0)), (
                    "touched"
                )
                total = gradclip.get_total_norm([cases.gradient(owner)], norm_type)
                assert math.isnan(total) if math.isnan(bad) else total.item() == INF
    for step in (100.0, 1.0, 0.01):
        owner = cases.parameter(torch.tensor([step]), line, Shard(0))
        total = gradclip.clip_([owner], 1e9, INF)
        assert total.item() == torch.tensor(step).item()


def test_nonfinite_gradients_on_each_rank_in_turn(two: World, four: World) -> None:
    for world in (two, four):
        world.run(nonfinite, world.size)


def wrong_dtype(rank: int, size: int) -> None:
    line = cases.mesh(size)
    for where in range(size):
        fine = cases.parameter(torch.ones(2 * size), line, Shard(0))
        odd = torch.ones(3)
        owner = cases.parameter(odd)
        if rank == where:
            owner = torch.nn.Parameter(torch.ones(3, dtype=torch.int32), requires_grad=False)
            owner.grad = torch.ones(3, dtype=torch.int32)
        named = [("fine", fine), ("odd", owner)]
        words = raised(clip_of(named, 0.1))
        assert words.startswith(f"rank {where}: gradient of `odd` is torch.int32; expected")
        assert bool((cases.local(fine) == 1).all())
        good_step()


def test_a_bad_dtype_on_one_rank(four: World) -> None:
    four.run(wrong_dtype, 4)


def overlapping(rank: int, size: int) -> None:
    line = cases.mesh(size)
    fine = cases.parameter(torch.ones(2 * size), line, Shard(0))
    base = torch.ones(6)
    parts = [base[:3], base[3:]] if rank != 1 else [base[:4], base[2:]]
    owners = []
    for part in parts:
        owner = torch.nn.Parameter(torch.zeros_like(part))
        owner.grad = part
        owners.append(owner)
    words = raised(lambda: gradclip.clip_([fine, *owners], 0.1, plain="distinct"))
    assert words.startswith("rank 1: "), words
    assert bool((cases.local(fine) == 1).all())
    assert bool((base == 1).all())
    good_step()


def test_overlapping_memory_on_one_rank(two: World) -> None:
    two.run(overlapping, 2)


def disagreements(rank: int, size: int) -> None:
    line = cases.mesh(size)
    owner = cases.parameter(torch.ones(3 * size), line, Shard(0))
    last = rank == size - 1
    group = dist.group.WORLD

    def clip(max_norm: float = 1.0, norm_type: float = 2.0, **more: Any) -> str:
        return raised(lambda: gradclip.clip_([owner], max_norm, norm_type, **more))

    words = clip(norm_type=1.0 if last else 2.0)
    assert "ranks disagree about norm_type: rank 0 has norm_type=2.0" in words
    assert f"rank {size - 1} has norm_type=1.0" in words
    for one, other in ((INF, 2.0), (2.0, INF), (-INF, INF), (3.0, -INF), (INF, 1.0)):
        assert "disagree about norm_type" in clip(norm_type=one if rank == 0 else other)
    assert "max_norm=2.0" in clip(max_norm=2.0 if last else 1.0)
    assert "max_norm, eps" in clip(eps=0.0 if last else 1e-6)
    assert "max_norm, eps" in clip(norm_type=INF, eps=0.0 if last else 1e-6)
    assert "error_if_nonfinite=True" in clip(error_if_nonfinite=last)
    assert "check_replicas=" in clip(check_replicas=True if last else None)
    assert bool((cases.local(owner) == 1).all())
    plain = cases.parameter(torch.ones(2))
    mine = [plain, owner] if last else [plain]
    words = raised(lambda: gradclip.clip_(mine, 1.0, group=group))
    assert "plain tensors (pass plain=)" in words
    good_step()


def test_disagreement_about_the_arguments(two: World, four: World) -> None:
    for world in (two, four):
        world.run(disagreements, world.size)


def differing_copies(rank: int) -> None:
    """Plain experts that differ between ranks without `plain=`: the error says what to write."""
    line = cases.mesh(2)
    for norm_type in (2.0, INF, 1.0):
        dense = cases.parameter(torch.ones(4), line, Shard(0))
        expert = cases.parameter(torch.ones(3) * (1 + rank))
        named = [("dense", dense), ("expert", expert)]
        words = raised(clip_of(named, 0.1, norm_type))
        assert words.startswith("copies of `expert` differ between the ranks")
        assert 'plain="distinct"' in words
        assert 'replicas={"expert": "distinct"}' in words
        assert bool((cases.local(dense) == 1).all())
        total = gradclip.clip_(named, INF, norm_type, plain="distinct", dtype=torch.float64)
        everything = [torch.ones(4), torch.ones(3), torch.full((3,), 2.0)]
        assert total.item() == cases.one_process_norm(everything, norm_type)
    good_step()


def test_plain_experts_that_differ(two: World) -> None:
    two.run(differing_copies)


def drifting_copies(rank: int) -> None:
    """Replicas are compared at their 1st, 2nd and 4th use, and at every call when asked."""
    both = cases.mesh(2, 2)
    owner = cases.parameter(torch.ones(8), both, Replicate(), Shard(0))
    with cases.counted_calls() as calls:
        gradclip.clip_([("w", owner)], INF)
    assert calls == ["all_reduce"]
    gradclip.clip_([("w", owner)], INF)
    if rank == 3:
        cases.local(owner)[0] = 5.0
    gradclip.clip_([("w", owner)], INF)
    assert "copies of `w` differ" in raised(lambda: gradclip.clip_([("w", owner)], INF))
    words = raised(lambda: gradclip.clip_([("w", owner)], INF, check_replicas=True))
    assert "copies of `w` differ" in words
    fresh = cases.parameter(torch.ones(8), both, Replicate(), Shard(0))
    if rank == 0:
        cases.local(fresh)[2] = 0.5
    assert "copies of `w` differ" in raised(lambda: gradclip.clip_([("w", fresh)], INF))
    gradclip.clip_([("w", fresh)], INF, check_replicas=False)
    other = cases.parameter(torch.ones(8), both, Replicate(), Shard(0))
    for expected in (["all_reduce"] * 2, ["all_reduce"] * 2, ["all_reduce"]):
        with cases.counted_calls() as calls:
            gradclip.clip_([("w", other)], INF, INF)
        assert calls == expected, "one more round where copies are seen first, for p = inf"
    good_step()


def test_copies_that_drift(four: World) -> None:
    four.run(drifting_copies)


def missing_copies(rank: int) -> None:
    """A gradient that only some copies have is not half counted but refused."""
    line = cases.mesh(2)
    owners = [cases.parameter(torch.ones(4), line, Replicate()) for _ in range(2)]
    named = [("a", owners[0]), ("b", owners[1])]
    gradclip.clip_(named, INF)
    if rank == 1:
        owners[1].grad = None
    assert "copies of `b` differ" in raised(lambda: gradclip.clip_(named, INF))
    owners[1].grad = None
    total = gradclip.clip_(named, INF)
    assert total.item() == 2.0


def test_a_gradient_that_only_some_copies_have(two: World) -> None:
    two.run(missing_copies)


def stages_taken_for_copies(rank: int) -> None:
    """Stages whose dimension has another name are found out, and the words name the argument."""
    world = cases.mesh(2, 2, names="stage dp")
    full = torch.ones(6) * (1 + world.get_local_rank("stage"))
    owner = cases.parameter(full, world["dp"], Shard(0))
    words = raised(lambda: gradclip.clip_([("w", owner)], INF))
    assert "distinct_dims=" in words
    for said in ("stage", ("stage",), (world["stage"],)):
        total = gradclip.clip_([("w", owner)], INF, distinct_dims=said, dtype=torch.float64)
        assert total.item() == math.sqrt(6 + 24)


def test_stages_taken_for_copies(four: World) -> None:
    four.run(stages_taken_for_copies)


def changing_sets(rank: int) -> None:
    """Frozen layers, unused experts and returning gradients: one collective each time."""
    line = cases.mesh(2)
    full = [torch.full((4,), float(k + 1)) for k in range(5)]
    owners = [cases.parameter(g, line, Shard(0)) for g in full]
    kept = [cases.gradient(o) for o in owners]
    for present in ([0, 1, 2, 3, 4], [0, 2], [], [4], [1, 2, 3], [0, 1, 2, 3, 4]):
        for k, owner in enumerate(owners):
            owner.grad = kept[k] if k in present else None
        for norm_type in cases.NORM_TYPES:
            with cases.counted_calls() as calls:
                total = gradclip.clip_(owners, INF, norm_type, dtype=torch.float64)
            assert calls == ["all_reduce"]
            expected = cases.one_process_norm([full[k] for k in present], norm_type)
            assert total.item() == expected
    lonely = cases.parameter(torch.ones(4), line, Shard(0))
    if rank == 1:
        lonely.grad = None
    assert gradclip.clip_([lonely], INF).item() == torch.tensor(2.0).sqrt().item()


@pytest.mark.filterwarnings("ignore:no parameter has a gradient")
def test_a_changing_set_of_gradients(two: World) -> None:
    two.run(changing_sets)


def other_dtypes(rank: int) -> None:
    """Ranks whose gradients have other dtypes return the same norm in the same dtype."""
    mine = torch.full((4,), 0.5, dtype=[torch.float32, torch.float64][rank])
    owner = cases.parameter(mine)
    total = gradclip.clip_([owner], 1.0, group=dist.group.WORLD)
    assert total.dtype == torch.float64
    assert total.item() == math.sqrt(2.0)


def test_ranks_of_other_dtypes(two: World) -> None:
    two.run(other_dtypes)


def empty_shard(rank: int) -> None:
    """[3, 4] on one rank and nothing on the other, p = inf and 2."""
    line = cases.mesh(2)
    for norm_type in cases.NORM_TYPES:
        owner = cases.parameter(torch.tensor([[3.0, 4.0]]), line, Shard(0))
        assert cases.local(owner).numel() == (2 if rank == 0 else 0)
        cases.check_clip([owner], [torch.tensor([[3.0, 4.0]])], norm_type)
    for norm_type, expected in ((2.0, 5.0), (INF, 4.0), (-INF, 3.0)):
        mine = torch.tensor([3.0, 4.0] if rank == 0 else [])
        owner = cases.parameter(mine)
        total = gradclip.clip_([owner], 1.0, norm_type, eps=0.0, group=dist.group.WORLD)
        assert total.item() == expected
        if rank == 0:
            wanted = torch.tensor([3.0, 4.0]) * torch.tensor(1 / expected)
            assert torch.equal(cases.local(owner), wanted)


def test_an_empty_shard(two: World) -> None:
    two.run(empty_shard)


def extremes(rank: int) -> None:
    """Large and small values; terms out of float64's range go again with an agreed scale."""
    line = cases.mesh(2)
    for values, norm_type in (
        ([6e31, 4.0], 2.0),
        ([3e-45, 4e-45], 2.0),
        ([3e38, 3e38], 2.0),
        ([3e38, 1.0], 100.0),
        ([1e-40, 2e-40], 9.0),
        ([3.0, 2.0], 2.5),
        ([3e30, 2e-30], -20.0),
    ):
        full = torch.tensor(values)
        owner = cases.parameter(full, line, Shard(0))
        total = gradclip.clip_([owner], INF, norm_type, dtype=torch.float64)
        alone = gradclip.get_total_norm([full], norm_type, dtype=torch.float64)
        assert total.item() == alone.item()
        assert 0 < total.item() < INF
        each = gradclip.grad_norms([owner], norm_type, dtype=torch.float64)
        assert each.tolist() == [alone.item()]
    huge = cases.parameter(torch.tensor([6e31, 4.0]), line, Shard(0))
    gradclip.clip_([huge], 0.3)
    assert cases.whole(huge)[0].item() == pytest.approx(0.3, rel=1e-6)


def test_extreme_values(two: World) -> None:
    two.run(extremes)


def refused_on_one_rank(rank: int) -> None:
    """Arguments that one rank refuses, whatever the others ask for: all raise, nobody hangs."""
    line = cases.mesh(2)
    owner = cases.parameter(torch.ones(4), line, Shard(0))
    last = rank == 1
    for norm_type in (2.0, INF):
        words = raised(clip_of([owner], math.nan if last else 1.0, norm_type))
        if norm_type == 2.0:
            assert words.startswith("rank 1: `max_norm` is nan")
        assert "no gradient was changed" in words
    raised(clip_of([owner], 1.0, math.nan if last else 2.0))
    raised(clip_of([owner], 1.0, eps=-1.0 if last else 0.0))
    raised(clip_of([owner], 1.0, scale=0.0 if last else 2.0))
    raised(lambda: gradclip.get_total_norm([cases.gradient(owner)], math.nan if last else 2.0))

    def rule(name: str | None, parameter: torch.Tensor) -> None:
        if last:
            raise KeyError("no such layer")

    assert "no such layer" in raised(clip_of([owner], 1.0, replicas=rule))
    clipper = gradclip.Clipper([owner], 1.0)
    clipper.max_norm = -2.0 if last else 1.0
    assert "`max_norm` is -2" in raised(clipper.clip_)
    assert bool((cases.local(owner) == 1).all())
    good_step()


def test_arguments_that_one_rank_refuses(two: World) -> None:
    two.run(refused_on_one_rank)


def lost_partial(rank: int) -> None:
    """A partial gradient that one rank lost brings zeros, and everybody still finishes."""
    from torch.distributed.tensor import Partial

    line = cases.mesh(2)
    holder = torch.nn.Parameter(DTensor.from_local(torch.zeros(4), line, [Replicate()]))
    holder.grad = DTensor.from_local(torch.ones(4) * (rank + 1), line, [Partial()], run_check=False)
    assert gradclip.clip_([holder], INF).item() == 6.0
    if rank == 0:
        holder.grad = None
    assert gradclip.clip_([holder], INF).item() == 4.0


def test_a_partial_gradient_that_one_rank_lost(two: World) -> None:
    two.run(lost_partial)
