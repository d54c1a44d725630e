"""Where the vector travels, what it says, and the pieces that need no other process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import gradclip
from gradclip.sharding import ShardedClipError, agreement, compat, transport
from tests.distributed import cases
from tests.distributed.world import World
from tests.gradients import parameters


@pytest.mark.parametrize(
    ("backends", "cuda", "expected"),
    [
        ({"cpu": "gloo", "cuda": "gloo"}, True, "cpu"),
        ({"cuda": "nccl"}, True, "cuda"),
        ({"cpu": "gloo", "cuda": "nccl"}, True, "cuda"),
        ({"cpu": "gloo", "cuda": "nccl"}, False, "cpu"),
        ({"cpu": "gloo"}, True, "cpu"),
        ({"cpu": "mpi", "cuda": "mpi"}, False, "cpu"),
    ],
)
def test_the_device_is_the_groups(
    backends: dict[str, str], cuda: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPU-offloaded gradients beside NCCL travel over CUDA, CUDA gradients beside gloo do not."""
    monkeypatch.setattr(compat, "backends", lambda group: backends)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    group: Any = None
    found = transport.device_of(group)
    assert found.type == expected
    assert found.index == (3 if expected == "cuda" else None)


def test_a_hook_needs_no_torch_distributed() -> None:
    """Two communicating processes played in one: the hook adds what the other one brings."""
    mine, other = torch.tensor([3.0, 4.0]), torch.tensor([12.0])
    kept: list[torch.Tensor] = []

    def record(vector: torch.Tensor, operation: str) -> None:
        kept.append(vector.clone())

    gradclip.clip_(parameters([other]), 6.5, reduce=record)

    def add(vector: torch.Tensor, operation: str) -> None:
        assert operation == "sum"
        vector += kept[0]

    owners = parameters([mine])
    assert gradclip.clip_(owners, 6.5, reduce=add, eps=1e-6).item() == 13.0
    assert mine.tolist() == pytest.approx([1.5, 2.0])


def test_a_hook_hears_of_an_error() -> None:
    """A rank that fails still reduces, and its own words come back to it."""
    operations = []

    def alone(vector: torch.Tensor, operation: str) -> None:
        operations.append(operation)

    owner = torch.nn.Parameter(torch.zeros(2, dtype=torch.int32), requires_grad=False)
    owner.grad = torch.ones(2, dtype=torch.int32)
    with pytest.raises(ShardedClipError, match=r"a rank: gradient of `w` is torch\.int32"):
        gradclip.clip_([("w", owner)], 1.0, reduce=alone)
    assert operations == ["sum", "max", "sum"]


def reduced(tails: list[list[int]], form: str) -> list[int]:
    columns = zip(*tails, strict=True)
    return [sum(column) if form == "sum" else max(column) for column in columns]


def tail_of(tags: tuple[int, ...] = (5, 6, 7, 8), **more: Any) -> agreement.Tail:
    return agreement.Tail(3, tags, **more)


@pytest.mark.parametrize("maximum", [False, True])
def test_agreement_is_exact(maximum: bool) -> None:
    form = "max" if maximum else "sum"
    highest = 2**agreement.TAG_BITS - 1
    same = [tail_of((highest, 1, 0, 2)).words(maximum)] * 1000
    assert not agreement.read(reduced(same, form), maximum).bad
    for place in range(4):
        tags = [highest, 1, 0, 2]
        tags[place] ^= 1
        differing = [*same[:-1], tail_of(tuple(tags)).words(maximum)]
        verdict = agreement.read(reduced(differing, form), maximum)
        assert verdict.disagreements == (agreement.SUBJECTS[place],)


@pytest.mark.parametrize("maximum", [False, True])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_failed_rank_is_named(maximum: bool, rank: int) -> None:
    tails = [tail_of(failed=rank + 1 if k == rank else 0).words(maximum) for k in range(4)]
    verdict = agreement.read(reduced(tails, "max" if maximum else "sum"), maximum)
    assert verdict.bad
    assert verdict.failed_rank == rank


@pytest.mark.parametrize("maximum", [False, True])
def test_what_a_device_expects_is_what_the_host_reads(maximum: bool) -> None:
    """The device's comparison with the expected words finds just what the host finds."""
    form = "max" if maximum else "sum"
    mine = tail_of(token=9)
    good, fixed = agreement.expected(mine, 3, maximum)
    for others in (
        [tail_of(token=9), tail_of(token=9)],
        [tail_of(token=9, failed=2), tail_of(token=9)],
        [tail_of(token=9, pending=True), tail_of(token=9)],
        [tail_of(token=9, changed=maximum), tail_of(token=9)],
        [tail_of((4, 6, 7, 8), token=9), tail_of((6, 6, 7, 8), token=9)],
        [tail_of((5, 6, 8, 8), token=9), tail_of(token=9)],
        [tail_of(token=9 + maximum), tail_of(token=9)],
    ):
        tails = [tail.words(maximum) for tail in (mine, *others)]
        words = reduced(tails, form)
        differs = any((w - g) * f for w, g, f in zip(words, good, fixed, strict=True))
        assert differs == agreement.read(words, maximum).needs_rounds


@pytest.mark.parametrize("sums_first", [False, True])
@pytest.mark.parametrize("ranks", range(2, 6))
def test_mixed_forms_are_found_out(ranks: int, sums_first: bool) -> None:
    """Every chain of sums and maxima, each rank reducing by its own form: nobody is content."""
    for forms in range(1, 2**ranks - 1):
        is_max = [bool(forms >> k & 1) for k in range(ranks)]
        words = [tail_of().words(maximum) for maximum in is_max]
        order = range(ranks) if sums_first else range(ranks - 1, -1, -1)
        total: list[int] | None = None
        for k in order:
            total = (
                words[k] if total is None else reduced([total, words[k]], ["sum", "max"][is_max[k]])
            )
        assert total is not None
        assert agreement.read(total, False).disagreements
        assert agreement.read(total, True).disagreements


def test_balances_need_no_order() -> None:
    shares = [[agreement.balanced_share(k, 3, "w", n) for n in (1, 2, 3)] for k in range(3)]
    added = [agreement.added(own) for own in (shares[0], shares[1][::-1], shares[2])]
    assert agreement.added(added) == (0, 0)
    missing = [agreement.added(own) for own in (shares[0], shares[1][1:], shares[2])]
    assert all(agreement.added(missing))


def bad_partial(rank: int) -> None:
    """A partial gradient of a wrong dtype on one rank: the reduction still ends, all raise."""
    line = cases.mesh(2)
    fine = torch.nn.Parameter(DTensor.from_local(torch.zeros(4), line, [Replicate()]))
    fine.grad = DTensor.from_local(torch.ones(4), line, [Partial()], run_check=False)
    odd = torch.nn.Parameter(DTensor.from_local(torch.zeros(3), line, [Replicate()]))
    odd.grad = DTensor.from_local(torch.ones(3), line, [Partial()], run_check=False)
    if rank == 1:
        wrong: Any = DTensor.from_local(
            torch.ones(3, dtype=torch.int32), line, [Partial()], run_check=False
        )
        odd = torch.nn.Parameter(odd.detach(), requires_grad=False)
        odd.main_grad = wrong  # type: ignore[attr-defined]
        fine.main_grad = fine.grad  # type: ignore[attr-defined]
    else:
        odd.main_grad, fine.main_grad = odd.grad, fine.grad  # type: ignore[attr-defined]
    with pytest.raises(ShardedClipError, match=r"rank 1: gradient of `odd` is torch\.int32"):
        gradclip.clip_([("fine", fine), ("odd", odd)], 0.1, grad="main_grad")
    assert bool((cases.local(fine) == 1).all())


@pytest.mark.distributed
def test_a_bad_partial_gradient(two: World) -> None:
    two.run(bad_partial)


def raw_steps(rank: int) -> list[int]:
    """New gradient objects of the same layouts at each step decide and compare nothing anew."""
    both = cases.mesh(2, 2)
    calls = []
    for _ in range(3):
        owner = cases.parameter(torch.ones(6), both, Replicate(), Shard(0))
        with cases.counted_calls() as made:
            gradclip.get_total_norm([cases.gradient(owner)], math.inf)
        calls.append(len(made))
    return calls


@pytest.mark.distributed
def test_raw_gradients_are_known_by_their_layouts(four: World) -> None:
    assert four.run(raw_steps) == [[2, 2, 1]] * 4


def flat_parameters(rank: int) -> None:
    """FSDP1: plain flat shards, summed over the group."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        torch.nn.Linear(5, 3), use_orig_params=True, device_id=torch.device("cpu")
    )
    model(torch.ones(2, 5)).square().sum().backward()
    owners = [owner for owner in model.parameters() if owner.grad is not None]
    shards: list[Any] = [None, None]
    dist.all_gather_object(shards, [cases.local(owner) for owner in owners])
    full = [shard for rank_shards in shards for shard in rank_shards]
    expected = cases.one_process_norm(full, 2.0)
    total = gradclip.clip_(owners, 0.5, dtype=torch.float64, group=dist.group.WORLD)
    assert total.item() == expected


@pytest.mark.distributed
def test_fsdp1_shards(two: World) -> None:
    two.run(flat_parameters)
