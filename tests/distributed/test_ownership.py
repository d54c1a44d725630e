"""Over all ranks every element of every logical gradient is counted exactly once.

Every rank of the world is played in one process, over torch's fake process group.
"""

from __future__ import annotations

import importlib
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as distribute
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from gradclip.sharding import OwnershipError, compat, copies, placements
from gradclip.sharding.ownership import Ownership, Surroundings, mesh_layout

WORLD = 8


def each_rank(world: int = WORLD) -> Iterator[int]:
    """Play each rank in turn."""
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            yield rank
        finally:
            dist.destroy_process_group()


def placed(numbers: torch.Tensor, mesh: DeviceMesh, where: Sequence[Placement]) -> DTensor:
    """A DTensor of `numbers` without communication: every rank cuts its own piece."""
    return distribute(numbers, mesh, where, src_data_rank=None)


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def owned(tensor: torch.Tensor, share: Ownership) -> list[float]:
    flat = compat.local_tensor(tensor).detach().reshape(-1)
    low, high = share.slice(flat.numel())
    found: list[float] = flat[low:high].tolist()
    return found


def counted(
    build: Callable[[], DTensor], group: range = range(WORLD), **how: Any
) -> Counter[float]:
    """How often each number is counted, summed over the ranks."""
    count: Counter[float] = Counter()
    for rank in each_rank():
        tensor = build()
        around = Surroundings(rank, tuple(group), **how)
        if rank in group:
            share = around.of_dtensor(tensor.device_mesh, tensor.placements, None, "`w`")
            count.update(owned(tensor, share))
    return count


def mesh(*shape: int, names: Sequence[str] | None = None) -> DeviceMesh:
    labels = tuple(names or (f"d{k}" for k in range(len(shape))))
    return init_device_mesh("cpu", shape, mesh_dim_names=labels)


LAYOUTS: dict[str, Callable[[torch.Tensor], DTensor]] = {
    "one mesh, shards": lambda t: placed(t, mesh(8), [Shard(0)]),
    "one mesh, copies": lambda t: placed(t, mesh(8), [Replicate()]),
    "shards of the second dimension": lambda t: placed(t, mesh(8), [Shard(1)]),
    "copies of shards": lambda t: placed(t, mesh(2, 4), [Replicate(), Shard(0)]),
    "shards of copies": lambda t: placed(t, mesh(2, 4), [Shard(0), Replicate()]),
    "two shards": lambda t: placed(t, mesh(2, 4), [Shard(0), Shard(1)]),
    "one dimension twice": lambda t: placed(t, mesh(2, 4), [Shard(0), Shard(0)]),
    "three dimensions": lambda t: placed(t, mesh(2, 2, 2), [Shard(1), Replicate(), Shard(0)]),
    "outer slice": lambda t: placed(t, mesh(2, 4)["d0"], [Shard(0)]),
    "inner slice": lambda t: placed(t, mesh(2, 4)["d1"], [Shard(0)]),
    "middle slice": lambda t: placed(t, mesh(2, 2, 2)["d1"], [Shard(0)]),
    "first and last": lambda t: placed(t, mesh(2, 2, 2)["d0", "d2"], [Replicate(), Shard(0)]),
    "flattened": lambda t: placed(t, mesh(2, 2, 2)["d0", "d1"]._flatten("flat"), [Shard(0)]),
    "flattened copies": lambda t: placed(t, mesh(2, 2, 2)["d0", "d1"]._flatten("f"), [Replicate()]),
    "size one": lambda t: placed(t, mesh(8, 1), [Shard(0), Replicate()]),
    "slice of size one": lambda t: placed(t, mesh(8, 1)["d1"], [Replicate()]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(11, 3), (8, 8), (1, 2), (5, 1), (2, 9)])
def test_every_element_counts_once(layout: str, shape: tuple[int, ...]) -> None:
    full = numbers(*shape)
    assert counted(lambda: LAYOUTS[layout](full)) == Counter(full.flatten().tolist())


@pytest.mark.skipif(not hasattr(DeviceMesh, "_unflatten"), reason="this torch cannot unflatten")
@pytest.mark.parametrize("names", [("dp",), ("pp",), ("tp",), ("dp", "tp"), ("pp", "tp")])
def test_a_mesh_unflattened_from_a_flat_world_counts_once(names: tuple[str, ...]) -> None:
    full = numbers(6, 5)

    def build() -> DTensor:
        world = mesh(8, names=("world",))._unflatten(0, (2, 2, 2), ("pp", "dp", "tp"))
        return placed(full, world[names], [Shard(0)] * len(names))

    assert counted(build) == Counter(full.flatten().tolist())


def test_an_unflattened_stage_dimension_is_named_by_its_mesh() -> None:
    full = numbers(6)
    count: Counter[float] = Counter()
    for rank in each_rank():
        world = mesh(8, names=("world",))._unflatten(0, (2, 2, 2), ("pp", "dp", "tp"))
        stage = world.get_local_rank(0)
        tensor = placed(full + 100 * stage, world["dp"], [Shard(0)])
        around = Surroundings(rank, tuple(range(WORLD)), distinct_dims=(world["pp"],))
        share = around.of_dtensor(tensor.device_mesh, tensor.placements, None, "`w`")
        count.update(owned(tensor, share))
    assert count == Counter((full.tolist()) + (full + 100).tolist())


@pytest.mark.parametrize("where", ["dp", "tp", "both", "stage-wide copies"])
def test_stages_are_other_tensors(where: str) -> None:
    full = numbers(7, 3)
    count: Counter[float] = Counter()
    for rank in each_rank():
        world = mesh(2, 2, 2, names=("pp", "dp", "tp"))
        mine = full + 100 * world.get_local_rank(0)
        tensor = {
            "dp": lambda t=mine, w=world: placed(t, w["dp"], [Shard(0)]),
            "tp": lambda t=mine, w=world: placed(t, w["tp"], [Shard(1)]),
            "both": lambda t=mine, w=world: placed(t, w["dp", "tp"], [Shard(0), Shard(0)]),
            "stage-wide copies": lambda t=mine, w=world: placed(t, w["tp"], [Replicate()]),
        }[where]()
        around = Surroundings(rank, tuple(range(WORLD)))
        share = around.of_dtensor(tensor.device_mesh, tensor.placements, None, "`w`")
        count.update(owned(tensor, share))
    assert count == Counter([*full.flatten().tolist(), *(full + 100).flatten().tolist()])


def test_a_stage_dimension_inside_the_mesh_is_placed_as_it_says() -> None:
    full = numbers(7, 3)

    def build() -> DTensor:
        return placed(full, mesh(2, 4, names=("pp", "dp")), [Replicate(), Shard(0)])

    assert counted(build) == Counter(full.flatten().tolist())


def test_fully_sharded_tensor_parallel_weights_count_once() -> None:
    counts: dict[str, Counter[float]] = {
        name: Counter() for name in ("up.weight", "up.bias", "down.weight", "down.bias")
    }
    for rank in each_rank():
        world = mesh(4, 2, names=("dp", "tp"))
        up, down = torch.nn.Linear(6, 10), torch.nn.Linear(10, 6)
        model = torch.nn.Sequential(OrderedDict(up=up, down=down))
        for _, parameter in _dtensors(model):
            parameter.data = numbers(*parameter.shape).float()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        with _sharing_without_scatter():
            parallelize_module(model, world["tp"], plan)
            fully_shard(model, mesh=world["dp"])
        around = Surroundings(rank, tuple(range(WORLD)))
        for name, parameter in _dtensors(model):
            share = around.of_dtensor(parameter.device_mesh, parameter.placements, None, name)
            counts[name].update(owned(parameter, share))
    for name, shape in {"up.weight": (10, 6), "up.bias": (10,), "down.weight": (6, 10)}.items():
        assert counts[name] == Counter(numbers(*shape).flatten().tolist()), name
    assert counts["down.bias"] == Counter(numbers(6).tolist())


def _dtensors(model: torch.nn.Module) -> list[tuple[str, Any]]:
    return list(model.named_parameters())


class _sharing_without_scatter:  # noqa: N801
    """Tensor parallelism scatters from rank 0, which a fake group cannot: cut locally instead."""

    def __enter__(self) -> None:
        style: Any = importlib.import_module("torch.distributed.tensor.parallel.style")
        self.style, self.original = style, style.distribute_tensor
        style.distribute_tensor = lambda t, m, p, **_: placed(t, m, p)

    def __exit__(self, *_: object) -> None:
        self.style.distribute_tensor = self.original


def test_partial_dimensions_are_owned_by_piece_and_copies_still_shared() -> None:
    for rank in each_rank():
        world = mesh(2, 4)
        around = Surroundings(rank, tuple(range(WORLD)))
        share = around.of_dtensor(world, [Replicate(), Partial("avg")], None, "`w`")
        assert (share.index, share.count) == (world.get_local_rank(0), 2)
        assert share.partial == ((1, "avg"),)


def test_a_group_smaller_than_the_root_counts_its_own_copies() -> None:
    full = numbers(5, 2)
    count: Counter[float] = Counter()
    for rank in each_rank():
        world = mesh(4, 2, names=("dp", "tp"))
        group = compat.group_ranks(world["tp"].get_group())
        tensor = placed(full, world, [Replicate(), Shard(0)])
        around = Surroundings(rank, group)
        share = around.of_dtensor(tensor.device_mesh, tensor.placements, None, "`w`")
        if 0 in group:
            count.update(owned(tensor, share))
    assert count == Counter(full.flatten().tolist())


def test_a_group_without_all_pieces_is_refused() -> None:
    for rank in each_rank():
        world = mesh(4, 2, names=("dp", "tp"))
        around = Surroundings(rank, compat.group_ranks(world["tp"].get_group()))
        with pytest.raises(OwnershipError, match=r"group= leaves out ranks .* pieces of `w`"):
            around.of_dtensor(world, [Shard(0), Replicate()], None, "`w`")


def test_a_root_that_does_not_cover_the_group_is_refused_with_the_remedy() -> None:
    for rank in each_rank():
        world = mesh(4, 2, names=("dp", "tp"))
        island = DeviceMesh.from_group(world.get_group("tp"), "cpu", mesh_dim_names=("tp",))
        around = Surroundings(rank, tuple(range(WORLD)))
        with pytest.raises(OwnershipError) as refusal:
            around.of_dtensor(island, [Shard(0)], None, "`w`")
        for word in ('replicas={"w": "distinct"}', "RANKS", "group=", "4", "`w`"):
            assert word in str(refusal.value)


@pytest.mark.parametrize("said", ["distinct", "group", "ranks", "mesh"])
def test_replicas_settles_a_mesh_of_its_own(said: Any) -> None:
    full = numbers(5)
    count: Counter[float] = Counter()
    for rank in each_rank():
        world = mesh(4, 2, names=("dp", "tp"))
        island = DeviceMesh.from_group(world.get_group("tp"), "cpu", mesh_dim_names=("tp",))
        column = compat.mesh_ranks(world["dp"])
        value = {"group": world.get_group("dp"), "ranks": list(column), "mesh": world["dp"]}
        shift = 100 * world.get_local_rank(0) if said == "distinct" else 0
        tensor = placed(full + shift, island, [Shard(0)])
        around = Surroundings(rank, tuple(range(WORLD)))
        share = around.of_dtensor(island, [Shard(0)], value.get(said, said), "`w`")
        count.update(owned(tensor, share))
    stages = range(0, 400, 100) if said == "distinct" else [0]
    assert count == Counter([x + s for s in stages for x in full.tolist()])


def test_a_rank_outside_the_mesh_counts_nothing_once_declared() -> None:
    full = numbers(6)
    count: Counter[float] = Counter()
    for rank in each_rank():
        corner = DeviceMesh("cpu", [0, 1])
        tensor = placed(full, corner, [Shard(0)])
        around = Surroundings(rank, tuple(range(WORLD)))
        share = around.of_dtensor(corner, [Shard(0)], "distinct", "`w`")
        assert share.count == (1 if rank < 2 else 0)
        count.update(owned(tensor, share))
    assert count == Counter(full.tolist())


def test_a_tied_copy_over_two_stages_counts_once_when_declared() -> None:
    full = numbers(6, 2)
    count: Counter[float] = Counter()
    for rank in each_rank():
        world = mesh(2, 2, 2, names=("pp", "dp", "tp"))
        tensor = placed(full, world["dp", "tp"], [Shard(0), Replicate()])
        around = Surroundings(rank, tuple(range(WORLD)))
        share = around.of_dtensor(tensor.device_mesh, tensor.placements, world["pp"], "`w`")
        count.update(owned(tensor, share))
    assert count == Counter(full.flatten().tolist())


@pytest.mark.parametrize("said", [None, "replicated", "distinct", "stage ranks", "elsewhere"])
def test_plain_tensors(said: Any) -> None:
    counts: Counter[tuple[int, int]] = Counter()
    for rank in each_rank():
        world = mesh(2, 4, names=("pp", "tp"))
        stage = world.get_local_rank(0)
        value = list(range(4 * stage, 4 * stage + 4)) if said == "stage ranks" else said
        around = Surroundings(rank, tuple(range(WORLD)))
        share = around.of_plain(value, [mesh_layout(world["tp"])], "`w`")
        low, high = share.slice(10)
        counts.update((stage, k) for k in range(low, high))
    per_element = {"distinct": 4, "elsewhere": 0}.get(said, 1)
    assert counts == Counter({(s, k): per_element for s in range(2) for k in range(10)}) or (
        per_element == 0 and not counts
    )


def test_plain_tensors_alone_are_shards() -> None:
    share = Surroundings(3, tuple(range(WORLD))).of_plain(None, [], "`w`")
    assert share.slice(10) == (0, 10)


def test_copies_that_leave_out_the_asking_rank_are_refused() -> None:
    around = Surroundings(3, tuple(range(WORLD)))
    with pytest.raises(OwnershipError, match=r"ranks \[0, 1\], but rank 3 has one too"):
        around.of_plain([0, 1], [], "`w`")
    with pytest.raises(OwnershipError, match=r"copies of `w` are given as 'twice'"):
        around.of_plain("twice", [], "`w`")


def test_placements_are_known_by_name() -> None:
    strided = _StridedShard(0, split_factor=2)
    assert placements.meaning(strided) == placements.UNIQUE
    assert placements.meaning(Shard(1)) == placements.UNIQUE
    assert placements.meaning(Replicate()) == placements.REPLICA
    assert placements.meaning(Partial("sum")) == "partial:sum"
    with pytest.raises(ValueError, match=r"Partial\(max\) cannot be clipped"):
        placements.meaning(Partial("max"))


def test_unknown_placements_are_refused_by_name_until_registered() -> None:
    class RaggedShard(Placement):
        pass

    with pytest.raises(ValueError, match=r"`RaggedShard` is unknown.*register_unique_placement"):
        placements.meaning(RaggedShard())
    placements.register_unique_placement(RaggedShard)
    assert placements.meaning(RaggedShard()) == placements.UNIQUE


def test_norm_partials_and_mask_partials_are_refused() -> None:
    from torch.distributed.tensor._ops._math_ops import _NormPartial

    with pytest.raises(ValueError, match="_NormPartial"):
        placements.meaning(_NormPartial(2.0))


def test_coordinates_come_as_a_list_or_a_tuple() -> None:
    class Listing:
        def get_coordinate(self) -> list[int]:
            return [1, 0]

    assert compat.coordinate(Listing()) == (1, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("positions", "total", "digits"),
    [
        ([0, 1, 2, 3], 8, ((1, 4),)),
        ([1, 3], 8, ((2, 2),)),
        ([2, 3, 6, 7], 8, ((1, 2), (4, 2))),
        ([5], 8, ()),
        (range(8), 8, ((1, 8),)),
    ],
)
def test_digits_of_positions(positions: Sequence[int], total: int, digits: Any) -> None:
    assert copies.digits_of(positions, total) == digits


@pytest.mark.parametrize("positions", [[0, 1, 3], [0, 2, 3], [0, 1, 2], [0, 3]])
def test_irregular_positions_are_refused(positions: Sequence[int]) -> None:
    with pytest.raises(ValueError, match="no regular part"):
        copies.digits_of(positions, 8)


@pytest.fixture(autouse=True)
def _quiet_meshes() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
