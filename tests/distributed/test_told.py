"""What one rank refuses before the exchange reaches every rank, and words that mean nothing."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import gradclip
from gradclip.sharding import ShardedClipError
from tests.distributed import cases
from tests.distributed.test_failures import raised
from tests.distributed.world import World
from tests.gradients import parameters

INF = math.inf
ABSENT = (
    "`w` has no attribute `main_grad`; name the attribute that holds gradients by grad= (None in it"
    " is no gradient)"
)


def plain() -> torch.nn.Parameter:
    return cases.parameter(torch.full((4,), 10.0))


def on_mesh() -> torch.nn.Parameter:
    return cases.parameter(torch.full((4,), 10.0), cases.mesh(2), Shard(0))


def setups() -> list[tuple[torch.nn.Parameter, dict[str, Any]]]:
    """A plain parameter with a group, and a DTensor without."""
    return [(plain(), {"group": dist.group.WORLD, "plain": "distinct"}), (on_mesh(), {})]


def calls(given: Any, **more: Any) -> list[Callable[[], object]]:
    """Every function that goes over ranks, to be called later."""
    return [
        lambda: gradclip.clip_(given, 1.0, **more),
        lambda: gradclip.Clipper(given, 1.0, **more).clip_(),
        lambda: gradclip.grad_norms(given, **more),
    ]


def missing_attribute(rank: int) -> None:
    for owner, said in setups():
        named = [("w", owner)]
        for grad in ("main_grad", "main_grad" if rank == 1 else "grad"):
            for call in calls(named, grad=grad, **said):
                assert ABSENT in raised(call)
        for call in calls([owner], grad="main_grad", **said):
            assert "parameter 0 has no attribute `main_grad`" in raised(call)
        assert bool((cases.local(owner) == 10).all())
        owner.main_grad = None  # type: ignore[attr-defined]
        gradclip.clip_(named, 1.0, grad="main_grad", **said)
    owner = on_mesh()
    alone: list[Callable[[], object]] = [
        lambda: gradclip.clip_grad_value_([("w", owner)], 1.0, grad="main_grad"),
        lambda: gradclip.clip_grads_with_norm_([("w", owner)], 1.0, 2.0, grad="main_grad"),
    ]
    for local in alone:
        with pytest.raises(AttributeError) as error:
            local()
        assert str(error.value) == ABSENT


@pytest.mark.filterwarnings("ignore:no parameter has a gradient")
@pytest.mark.distributed
def test_a_missing_attribute(two: World) -> None:
    two.run(missing_attribute)


#: What one rank may pass instead of its list of parameters, and what all ranks hear.
LISTS: dict[str, Callable[[Any], Any]] = {
    "None": lambda owner: None,
    "holds int at position 1": lambda owner: [owner, 1],
    "no (name, tensor) pair at position 1": lambda owner: [("w", owner), owner],
}
WORDS: dict[str, dict[str, Any]] = {
    "`grad` is 1; expected": {"grad": 1},
    "unknown argument `groups`": {"groups": None},
    "`distinct_dims` is 5; expected": {"distinct_dims": 5},
    "`reduce` is 1; expected": {"reduce": 1},
    "`replicas` is 5; expected": {"replicas": 5},
    "`plain` is 'elsewhere'; expected": {"plain": "elsewhere"},
    "`check_replicas` is 'x'; expected": {"check_replicas": "x"},
    "`check_replicas` is 0; expected": {"check_replicas": 0},
}


def functions() -> list[Callable[..., object]]:
    return [
        lambda given, **said: gradclip.clip_(given, 1.0, **said),
        lambda given, **said: gradclip.grad_norms(given, **said),
    ]


def refused_by_one(rank: int) -> None:
    """At the first call of a list and at a later one, when its session is known."""
    for function in functions():
        for owner, said in setups():
            for known in (False, True):
                if known:
                    function([("w", owner)], **said)
                before = cases.local(owner).clone()
                for words, bad in LISTS.items():
                    if words == "None" and not said:
                        continue  # nothing tells who the others are
                    mine = bad(owner) if rank == 1 else [("w", owner)]
                    told = raised(lambda: function(mine, **said))  # noqa: B023
                    assert told.startswith("rank 1: ")
                    assert words in told, told
                for words, more in WORDS.items():
                    mine = said | (more if rank == 1 else {})
                    told = raised(lambda: function([("w", owner)], **mine))  # noqa: B023
                    assert told.startswith("rank 1: ")
                    assert words in told
                assert torch.equal(cases.local(owner), before)


@pytest.mark.distributed
def test_arguments_that_one_rank_refuses(two: World) -> None:
    two.run(refused_by_one)


def refused_beside_pending_sums(rank: int) -> None:
    """A rank that refuses still brings zeros to a pending sum that others wait for."""
    line = cases.mesh(2)
    owner = torch.nn.Parameter(DTensor.from_local(torch.zeros(4), line, [Replicate()]))
    owner.grad = DTensor.from_local(torch.ones(4), line, [Partial()], run_check=False)
    for _ in range(2):
        mine: Any = [owner, 1] if rank == 1 else [owner]
        assert "holds int" in raised(lambda: gradclip.clip_(mine, INF))  # noqa: B023
        more: Any = {"plain": "elsewhere"} if rank == 1 else {}
        assert "`plain`" in raised(lambda: gradclip.clip_([owner], INF, **more))  # noqa: B023
        assert gradclip.clip_([owner], INF).item() == 4.0


@pytest.mark.distributed
def test_arguments_refused_beside_pending_sums(two: World) -> None:
    two.run(refused_beside_pending_sums)


def refused_by_a_clipper(rank: int) -> None:
    for owner, said in setups():
        clipper: Any = gradclip.Clipper([owner], 1.0, **said)
        for name, bad, words in (
            ("norm_type", "x", "`norm_type` is 'x'; expected a number"),
            ("max_norm", None, "`max_norm` is None; expected a number"),
            ("eps", -1.0, "`eps` is -1"),
            ("dtype", torch.int8, "`dtype` is torch.int8"),
        ):
            good = getattr(clipper, name)
            if rank == 1:
                setattr(clipper, name, bad)
            assert raised(clipper.clip_).startswith(f"rank 1: {words}")
            setattr(clipper, name, good)
        assert bool((cases.local(owner) == 10).all())
        clipper.clip_()


@pytest.mark.distributed
def test_attributes_of_a_clipper_that_one_rank_refuses(two: World) -> None:
    two.run(refused_by_a_clipper)


def meaningless_words(rank: int) -> None:
    group = dist.group.WORLD
    owner, stranger = plain(), plain()
    wrong: tuple[tuple[Any, str], ...] = (
        ({"plain": 1}, '`plain` is 1; expected "replicated", "distinct", or the ranks'),
        ({"plain": True}, "`plain` is True; expected"),
        ({"plain": ["0"]}, "`plain` is ['0']; expected"),
        ({"plain": "elsewhere"}, "`plain` is 'elsewhere'; expected"),
        (
            {"replicas": {"typo": "replicated"}},
            "`replicas` holds 'typo', which is not listed; leave it out",
        ),
        (
            {"replicas": {stranger: "replicated"}},
            "`replicas` holds a parameter, which is not listed",
        ),
        ({"replicas": {"w": 1}}, "`replicas` of 'w' is 1; expected"),
        ({"replicas": {"w": "foo"}}, "`replicas` of 'w' is 'foo'; expected"),
        ({"distinct_dims": (0,)}, "`distinct_dims` is (0,); expected"),
        ({"check_replicas": -1}, "`check_replicas` is -1; expected"),
    )
    for said, words in wrong:
        assert words in raised(lambda: gradclip.clip_([("w", owner)], 1.0, group=group, **said))  # noqa: B023
        with pytest.raises((TypeError, ValueError)) as error:
            gradclip.Clipper([("w", owner)], 1.0, group=group, **said)
        assert words in str(error.value)
    for call in calls([owner], group=group, replicas={"w": "replicated"})[::2]:
        assert "(name, parameter) pairs" in raised(call)
    assert bool((cases.local(owner) == 10).all())
    gradclip.clip_([("w", owner)], INF, group=group, plain="replicated", distinct_dims=("zz",))
    clipper = gradclip.Clipper([("w", owner)], INF, group=group, replicas={"w": "replicated"})
    assert clipper(max_norm=INF).item() == clipper.clip_().item() == 20.0


@pytest.mark.distributed
def test_words_that_mean_nothing(two: World) -> None:
    two.run(meaningless_words)


def unshared(rank: int) -> None:
    owner = plain()
    every: Any = ({"plain": "replicated"}, {"check_replicas": True}, {"distinct_dims": ("stage",)})
    for said in every:
        for call in calls([owner], **said):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call()
            (one,) = caught
            assert one.category is UserWarning
            assert f"`{next(iter(said))}`" in str(one.message)
            assert "nothing is shared; pass group=" in str(one.message)
            assert one.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradclip.clip_([owner], INF, group=None, plain=None)
        gradclip.clip_([owner], INF, plain="replicated", group=dist.group.WORLD)


@pytest.mark.distributed
def test_words_without_ranks_warn(two: World) -> None:
    two.run(unshared)


def test_words_are_checked_in_one_process() -> None:
    owner = parameters([torch.ones(2)])
    wrong: Any = {"plain": "foo"}
    for call in calls(owner, **wrong):
        with pytest.raises(ValueError, match="`plain` is 'foo'; expected"):
            call()
    with pytest.raises(ValueError, match="`plain` is 'foo'"):
        gradclip.Clipper(owner, 1.0, plain="foo")  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradclip.clip_(owner, 1.0, plain="replicated")


def test_a_hook_hears_of_wrong_words() -> None:
    operations = []
    owner = parameters([torch.ones(2)])
    more: Any = {"plain": 1}
    with pytest.raises(ShardedClipError, match="a rank: `plain` is 1"):
        gradclip.clip_(owner, 1.0, reduce=lambda vector, op: operations.append(op), **more)
    assert operations == ["sum", "max", "sum"]
