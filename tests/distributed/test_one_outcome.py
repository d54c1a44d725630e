"""Ranks that differ end as one: all return the exact norm and have clipped, or all raise the same.

Each case was once an abort, a wait or a wrong number on two ranks.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import gradclip
from gradclip.sharding import ShardedClipError
from tests.distributed import cases
from tests.distributed.test_failures import clip_of, good_step, raised
from tests.distributed.world import World

pytestmark = pytest.mark.distributed

INF = math.inf


def on(line: Any, values: torch.Tensor, *where: Placement) -> DTensor:
    return DTensor.from_local(values, line, where, run_check=False)


def replicated(line: Any, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
    """A parameter that every rank of the mesh holds."""
    return nn.Parameter(on(line, torch.zeros(*shape, dtype=dtype), *[Replicate()] * line.ndim))


def plain(*values: float) -> nn.Parameter:
    return cases.parameter(torch.tensor(values, dtype=torch.float32))


def unused_router(rank: int) -> None:
    line = cases.mesh(2)
    for norm_type, expected in ((2.0, 6.0), (1.0, 12.0), (INF, 3.0)):
        w = replicated(line, 4)
        if rank == 1:
            (w.to_local(grad_placements=[Partial()]) * 3).sum().backward()
        with cases.counted_calls() as calls:
            assert gradclip.clip_([w], 0.5, norm_type, eps=0.0).item() == expected
        assert calls[0] == "all_reduce"
        if rank == 1:
            assert torch.equal(cases.local(w), torch.full((4,), 3.0) * (0.5 / expected))
        assert gradclip.clip_([w], INF, norm_type).item() == pytest.approx(0.5)
    good_step()


def test_a_pending_gradient_that_one_rank_does_not_have(two: World) -> None:
    two.run(unused_router)


def mixed_pending(rank: int) -> None:
    """Partial gradients that differ between ranks in dtype, placement, layout or shape."""
    line = cases.mesh(2)

    def holder(gradient: Any, dtype: torch.dtype = torch.float32) -> Any:
        owner = replicated(line, 4, dtype=dtype)
        owner.main_grad = gradient
        return owner

    ones = torch.ones(4)
    partial = on(line, ones.clone(), Partial())
    others: dict[str, tuple[Any, str]] = {
        "dtype": (on(line, ones.double(), Partial()), "has a pending sum on some ranks"),
        "average": (on(line, ones.clone(), Partial("avg")), "has a pending sum on some ranks"),
        "replica": (on(line, ones.clone(), Replicate()), "differ between the ranks"),
        "shape": (on(line, torch.ones(5), Partial()), "has a pending sum on some ranks"),
        "sparse": (None, "sparse"),
        "float8": (on(line, ones.to(torch.float8_e4m3fn), Partial()), "float8_e4m3fn with a pend"),
        "integer": (on(line, torch.ones(4, dtype=torch.int32), Partial()), "int32"),
    }
    for name, (other, message) in others.items():
        if name == "sparse":
            other = on(line, ones.clone(), Partial())
            other._local_tensor = ones.to_sparse()
        for norm_type in (2.0, INF):
            owner = holder(partial if rank == 0 else other)
            found = raised(lambda: gradclip.clip_([("w", owner)], 0.5, norm_type, grad="main_grad"))  # noqa: B023
            assert message in found, (name, found)
            assert "`w`" in found
            assert torch.equal(cases.local_of(partial), ones)
    for dtype in (torch.float64, torch.bfloat16, torch.complex64):
        owner = holder(on(line, torch.full((4,), 3.0, dtype=dtype), Partial()), dtype)
        assert gradclip.clip_([owner], INF, grad="main_grad").item() == 12.0
    good_step()


def test_pending_gradients_of_different_kinds(two: World) -> None:
    two.run(mixed_pending)


def reordered_pending(rank: int) -> None:
    line = cases.mesh(2)
    named = []
    for name, value in (("a", 3.0), ("b", -3.0)):
        owner = replicated(line, 4)
        owner.grad = on(line, torch.full((4,), value), Partial())
        named.append((name, owner))
    for norm_type in (2.0, 1.0, INF):
        mine = named if rank == 0 else named[::-1]
        total = gradclip.clip_(mine, INF, norm_type, dtype=torch.float64)
        full = [torch.full((4,), 6.0), torch.full((4,), -6.0)]
        assert total.item() == cases.one_process_norm(full, norm_type)
    good_step()


def test_pending_gradients_in_another_order(two: World) -> None:
    two.run(reordered_pending)


def reordered_norms(rank: int) -> None:
    a, b = plain(1, 1, 1, 1), plain(10, 10, 10, 10)
    named = [("a", a), ("b", b)]
    mine = named if rank == 0 else named[::-1]
    each = gradclip.grad_norms(mine, group=dist.group.WORLD, plain="distinct", dtype=torch.float64)
    wanted = [math.sqrt(8.0), math.sqrt(800.0)]
    assert each.tolist() == (wanted if rank == 0 else wanted[::-1])
    good_step()


def test_norms_of_named_parameters_in_another_order(two: World) -> None:
    two.run(reordered_norms)


def permuted_replicas(rank: int) -> None:
    """Replicas whose elements, signs or parameters are swapped have the same sums."""
    group = dist.group.WORLD
    pairs = (([3.0, 4.0], [4.0, 3.0]), ([3.0, -4.0, 0.0, 1.0], [3.0, 4.0, 0.0, 1.0]))
    checks: tuple[Any, ...] = (None, True, 3)
    for check in checks:
        for norm_type in (2.0, INF):
            more: Any = {"group": group, "plain": "replicated", "check_replicas": check}
            for pair in pairs:
                owner = plain(*pair[rank])
                found = raised(lambda: gradclip.clip_([("w", owner)], 0.5, norm_type, **more))  # noqa: B023
                assert "`w`" in found
                assert torch.equal(cases.local(owner), torch.tensor(pair[rank]))
            first, second = plain(3, 4), plain(1, 2)
            if rank == 1:
                first, second = second, first
            for mine in ([("a", first), ("b", second)], [first, second]):
                found = raised(lambda: gradclip.clip_(mine, 0.5, norm_type, **more))  # noqa: B023
                assert "`a`" in found or "parameter 0" in found
    good_step()


def test_replicas_that_are_permuted(two: World) -> None:
    two.run(permuted_replicas)


class Odd:
    """A number that cannot be read."""

    def __float__(self) -> float:
        raise KeyError("weight")


def unreadable_numbers(rank: int) -> None:
    line = cases.mesh(2)
    owner = cases.parameter(torch.ones(4), line, Shard(0))
    clipper: Any = gradclip.Clipper([owner], 1.0)
    calls: dict[str, Callable[[Any], object]] = {
        "max_norm": lambda bad: gradclip.clip_([owner], bad),
        "norm_type": lambda bad: gradclip.clip_([owner], 1.0, bad),
        "scale": lambda bad: gradclip.clip_([owner], 1.0, scale=bad),
        "eps": lambda bad: gradclip.clip_([owner], 1.0, eps=bad),
    }
    for bad in (10**400, Odd()):
        for name, call in calls.items():
            message = raised(lambda: call(bad if rank == 0 else 1.0))  # noqa: B023
            assert message.startswith(f"rank 0: `{name}` is"), message
        clipper.max_norm = bad if rank == 0 else 1.0
        assert raised(clipper.clip_).startswith("rank 0: `max_norm` is")
        clipper.max_norm = 1.0
    assert bool((cases.local(owner) == 1).all())
    good_step()


def test_numbers_that_one_rank_cannot_read(two: World) -> None:
    two.run(unreadable_numbers)


def failing_generators(rank: int) -> None:
    line = cases.mesh(2)
    owner = cases.parameter(torch.ones(4), line, Shard(0))
    causes: tuple[Exception, ...] = (
        ValueError("file \udcff missing"),
        KeyError("weight"),
        OSError("disk"),
        UnicodeDecodeError("utf8", b"x", 0, 1, "bad"),
        StopAsyncIteration("odd"),
        ZeroDivisionError(),
    )

    def walk(cause: Exception) -> Iterator[torch.Tensor]:
        yield owner
        if rank == 0:
            raise cause

    for cause in causes:
        for more in ({}, {"group": dist.group.WORLD}):
            message = raised(lambda: gradclip.clip_(walk(cause), 1.0, **more))  # type: ignore[arg-type] # noqa: B023
            assert message.startswith("rank 0: ")
            assert "missing" in message or type(cause).__name__ in message
    for cause in (ValueError("a"), KeyError("b"), OSError("c"), TypeError("d")):
        with pytest.raises(type(cause)) as error:
            gradclip.clip_(walk(cause), 1.0)
        assert isinstance(error.value, ShardedClipError)
        assert str(error.value).startswith("rank 0: ")
    good_step()


def test_generators_that_fail_on_one_rank(two: World) -> None:
    two.run(failing_generators)


def different_functions(rank: int) -> None:
    line = cases.mesh(2)
    owners = [cases.parameter(torch.ones(4), line, Shard(0)) for _ in range(2)]
    alone = [cases.parameter(torch.full((4,), 1.0 + rank)) for _ in range(2)]
    for params, more in ((owners, {}), (alone, {"group": dist.group.WORLD})):
        gradients = [cases.gradient(owner) for owner in params]
        calls: dict[str, Callable[[], object]] = {
            "clip_": lambda: gradclip.clip_(params, 0.5, **more),  # type: ignore[arg-type] # noqa: B023
            "get_total_norm": lambda: gradclip.get_total_norm(gradients, **more),  # type: ignore[arg-type] # noqa: B023
            "grad_norms": lambda: gradclip.grad_norms(params, **more),  # type: ignore[arg-type] # noqa: B023
        }
        for first in calls:
            for second in calls:
                if first != second:
                    message = raised(calls[first] if rank == 0 else calls[second])
                    assert "ranks disagree about the function" in message
                    assert f"rank 0 calls {first}(" in message
                    assert f"rank 1 calls {second}(" in message
        assert len(gradclip.grad_norms(params, **more)) == 2  # type: ignore[arg-type]
        message = raised(lambda: gradclip.grad_norms(params if rank == 0 else params[:1], **more))  # type: ignore[arg-type] # noqa: B023
        assert "parameter" in message
        assert bool((cases.local(params[0]) == 1.0 + (rank if more else 0)).all())
    message = raised(lambda: gradclip.clip_(owners if rank == 0 else owners[:1], 0.5))
    assert "parameter 1 is not listed alike" in message
    good_step()


def test_ranks_that_call_different_functions(two: World) -> None:
    two.run(different_functions)


def bad_hooks(rank: int) -> None:
    """Hooks that do something else: an error that says what they must do, never a number."""
    world = dist.group.WORLD
    operations = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

    def good(vector: torch.Tensor, operation: str) -> None:
        dist.all_reduce(vector, op=operations[operation])

    def returned(vector: torch.Tensor, operation: str) -> torch.Tensor:
        copy = vector.clone()
        good(copy, operation)
        return copy

    def averaged(vector: torch.Tensor, operation: str) -> None:
        good(vector, "sum")
        vector //= 2

    def partial(vector: torch.Tensor, operation: str) -> None:
        return None

    def only_sums(vector: torch.Tensor, operation: str) -> None:
        good(vector, "sum")

    def only_maxima(vector: torch.Tensor, operation: str) -> None:
        good(vector, "max")

    def garbage(vector: torch.Tensor, operation: str) -> None:
        good(vector, operation)
        vector.random_()

    def zeros(vector: torch.Tensor, operation: str) -> None:
        vector.zero_()

    def some_garbage(vector: torch.Tensor, operation: str) -> None:
        good(vector, operation)
        vector[40] += 1 << 20

    def raising(vector: torch.Tensor, operation: str) -> None:
        raise OSError("connection lost")

    def asynchronous(vector: torch.Tensor, operation: str) -> Any:
        return dist.all_reduce(vector, op=operations[operation], async_op=True)

    every: list[tuple[Callable[..., Any], tuple[float, ...], bool]] = [
        (returned, (2.0, INF), True),
        (averaged, (2.0, INF), True),
        (partial, (2.0, INF), False),
        (only_sums, (INF,), True),
        (only_maxima, (2.0,), True),
        (garbage, (2.0, INF), True),
        (zeros, (2.0, INF), True),
        (some_garbage, (2.0,), True),
        (raising, (2.0, INF), True),
    ]
    for hook, norm_types, without_group in every:
        for norm_type in norm_types:
            for group in (world, None) if without_group else (world,):
                owner = plain(1.0 + rank, 1.0)
                with pytest.raises(ShardedClipError, match="`reduce` must reduce the int64 vector"):
                    gradclip.clip_([owner], 0.5, norm_type, reduce=hook, group=group)
                assert torch.equal(cases.local(owner), torch.tensor([1.0 + rank, 1.0]))
    for hook in (good, asynchronous):
        for group in (world, None):
            owner = plain(1.0 + rank, 1.0)
            assert (
                gradclip.clip_([owner], 0.5, reduce=hook, group=group).item()
                == torch.tensor(7.0).sqrt().item()
            )
    good_step()


def test_hooks_that_do_something_else(two: World) -> None:
    two.run(bad_hooks)


def same_arguments(rank: int) -> None:
    """Arguments that mean the same are the same."""
    line = cases.mesh(2)
    owner = cases.parameter(torch.ones(4), line, Shard(0))
    flag: Any = 1 if rank == 0 else True
    assert gradclip.clip_([owner], INF, error_if_nonfinite=flag).item() == 2.0
    assert gradclip.clip_([owner], 3, 2).item() == 2.0
    assert gradclip.clip_([owner], 3.0 if rank else 3, 2.0 if rank else 2).item() == 2.0
    gradclip.clip_([owner], -0.0 if rank == 0 else 0.0, eps=-0.0 if rank else 0.0)


def test_equal_arguments_of_other_types(two: World) -> None:
    two.run(same_arguments)


def noticed_at(clip: Callable[[], object], calls: int) -> int:
    """The call at which a difference between replicas is noticed, from 1 on."""
    for call in range(1, calls + 1):
        try:
            clip()
        except ShardedClipError as error:
            assert "copies of `w` differ" in str(error)  # noqa: PT017
            return call
    return calls + 1


def equal_while_zero(rank: int) -> None:
    """Replicas that are zero at first verify nothing: a difference shows a few steps on."""
    line = cases.mesh(2)
    for norm_type in (2.0, INF):
        for zero_steps in (1, 3, 5, 20):
            w = replicated(line, 4)
            clipper = gradclip.Clipper([("w", w)], INF, norm_type)
            for _ in range(zero_steps):
                w.grad = on(line, torch.zeros(4), Replicate())
                assert clipper.clip_().item() == 0.0
            w.grad = on(line, torch.full((4,), 1.0 + rank), Replicate())
            steps = noticed_at(clipper.clip_, 20)
            assert steps <= (1 if zero_steps <= 16 else 16)
    good_step()


def test_replicas_that_were_zero(two: World) -> None:
    two.run(equal_while_zero)


def checked_now_and_then(rank: int) -> list[int]:
    """The uses at which a difference is noticed, for each way to ask."""
    line = cases.mesh(2)
    noticed = []
    ways: tuple[Any, ...] = (None, True, 3, 5)
    for check in ways:
        w = replicated(line, 4)
        w.grad = on(line, torch.ones(4), Replicate())
        clipper = gradclip.Clipper([("w", w)], INF, check_replicas=check)
        for use in range(1, 20):
            if use == 3:
                w.grad = on(line, torch.full((4,), 1.0 + rank), Replicate())
            try:
                clipper.clip_()
            except ShardedClipError:
                noticed.append(use)
                break
    w = replicated(line, 4)
    w.grad = on(line, torch.full((4,), 1.0 + rank), Replicate())
    gradclip.clip_([w], INF, check_replicas=False)
    return noticed


def test_when_replicas_are_compared(two: World) -> None:
    assert two.run(checked_now_and_then) == [[4, 3, 4, 6]] * 2


def own_lists(rank: int) -> None:
    """Each rank gets the norms of its own list, where lists have nothing in common."""
    group = dist.group.WORLD
    mine = [("a", plain(3.0)), ("b", plain(4.0))] if rank == 0 else [("c", plain(12.0))]
    for norm_type in (2.0, INF, 2.5):
        each = gradclip.grad_norms(mine, norm_type, group=group)
        assert each.tolist() == ([3.0, 4.0] if rank == 0 else [12.0])
    mine = [("a", plain(3.0)), ("b", plain(4.0))] if rank == 0 else [("a", plain(12.0))]
    message = raised(lambda: gradclip.grad_norms(mine, group=group))
    assert "`a`" in message
    good_step()


def test_norms_of_lists_that_differ(two: World) -> None:
    two.run(own_lists)


def named_nonfinite(rank: int) -> None:
    line = cases.mesh(2)
    for norm_type in (2.0, INF):
        w = cases.parameter(torch.ones(6), line, Shard(0))
        if rank == 1:
            cases.local(w)[1] = math.nan
        message = raised(
            lambda: gradclip.clip_([("w", w)], 1.0, norm_type, error_if_nonfinite=True)  # noqa: B023
        )
        assert "non-finite" in message
        assert "rank 1" in message
        assert "`w`" in message
        assert "NaN" in message
    pending = replicated(line, 4)
    pending.grad = on(line, torch.full((4,), INF if rank else 1.0), Partial())
    message = raised(lambda: gradclip.clip_([("p", pending)], 1.0, error_if_nonfinite=True))
    assert "`p`" in message

    class Absent(nn.Parameter):
        @property
        def main_grad(self) -> torch.Tensor:
            raise KeyError("weight")

    bad = Absent(torch.ones(2))
    good = plain(1.0, 1.0)
    good.main_grad = None  # type: ignore[attr-defined]
    with pytest.raises(KeyError) as error:
        gradclip.clip_([bad if rank == 0 else good], 1.0, grad="main_grad", group=dist.group.WORLD)
    assert "rank 0: KeyError: 'weight'" in str(error.value)
    good_step()


def test_errors_name_rank_parameter_and_kind(two: World) -> None:
    two.run(named_nonfinite)


def undeclared_replicas(rank: int) -> None:
    """DistributedDataParallel, by its module and by equal gradients in a list."""
    torch.manual_seed(0)
    group = dist.group.WORLD
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    model(torch.ones(4, 3) * (1 + rank)).square().sum().backward()
    full = [cases.local(owner).clone() for owner in model.parameters()]
    expected = cases.one_process_norm(full, 2.0)
    assert gradclip.clip_(model, INF, dtype=torch.float64, group=group).item() == expected
    clipper = gradclip.Clipper(model, INF, dtype=torch.float64, group=group)
    assert clipper.clip_().item() == expected
    for norm_type in (2.0, INF):
        for _ in range(2):
            owners = list(model.parameters())
            message = raised(clip_of(owners, 0.5, norm_type, group=group))
            assert 'plain="replicated"' in message
            assert 'plain="distinct"' in message
    more: Any = {"group": group, "dtype": torch.float64}
    total = gradclip.clip_(list(model.parameters()), INF, plain="replicated", **more)
    assert total.item() == expected
    twice = gradclip.clip_(list(model.parameters()), INF, plain="distinct", **more)
    exact = sum(Fraction(float(x)) ** 2 for part in full for x in part.flatten())
    assert abs(Fraction(twice.item()) ** 2 - 2 * exact) < exact * Fraction(1, 2**50)
    different = [plain(1.0, 2.0), plain(3.0 + rank)]
    assert gradclip.clip_(different, INF, **more).item() == math.sqrt(1 + 4 + 9 + 1 + 4 + 16)
    zeros = [plain(0.0, 0.0)]
    assert gradclip.clip_(zeros, INF, **more).item() == 0.0
    good_step()


def test_plain_gradients_that_are_the_same_on_all_ranks(two: World) -> None:
    two.run(undeclared_replicas)


def cannot_tell(rank: int) -> None:
    """A rank that was passed nothing readable raises alone, as nothing names the others."""
    with pytest.raises(TypeError):
        gradclip.clip_(None, 1.0)  # type: ignore[arg-type]
    good_step()


def test_a_rank_that_cannot_tell_its_group(two: World) -> None:
    two.run(cannot_tell)


def dry_run() -> None:
    """Three clips of each layout on a fake group of eight, as dry runs of large layouts do."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    both = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    placed: tuple[tuple[Placement, ...], ...] = (
        (Replicate(), Shard(0)),
        (Shard(0), Shard(0)),
        (Replicate(), Replicate()),
        (Partial(), Replicate()),
    )
    for where in placed:
        for norm_type in (2.0, INF):
            weights = [Replicate() if p.is_partial() else p for p in where]
            owner: Any = nn.Parameter(on(both, torch.zeros(2), *weights))
            clipper = gradclip.Clipper([owner, plain(5.0)], 1.0, norm_type)
            for _ in range(3):
                owner.grad = on(both, torch.tensor([3.0, 4.0]), *where)
                assert math.isfinite(clipper.clip_().item())
                assert bool(cases.local(owner).isfinite().all())
                assert bool(gradclip.grad_norms([owner], norm_type).isfinite().all())
    with pytest.raises(TypeError, match=r"rank 0: gradient of `parameter 0` is torch\.int32"):
        gradclip.get_total_norm([on(both, torch.ones(2, dtype=torch.int32), Shard(0), Shard(0))])
    dist.destroy_process_group()


def test_a_dry_run_on_a_fake_group() -> None:
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=dry_run)
    process.start()
    process.join(60)
    assert process.exitcode == 0
