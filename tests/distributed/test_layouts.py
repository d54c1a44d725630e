"""The total norm over ranks has the bits of the one-process exact norm, for every layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import gradclip
from tests import oracle
from tests.distributed import cases, models
from tests.distributed.world import World

pytestmark = pytest.mark.distributed

INF = math.inf


def gradients(*shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=made).to(dtype) for shape in shapes]


def again(owners: Sequence[Any], check: Callable[[float], object]) -> None:
    """Run a check for each norm type on the same gradients."""
    kept = [cases.local(owner).clone() for owner in owners]
    for norm_type in cases.NORM_TYPES:
        check(norm_type)
        for owner, values in zip(owners, kept, strict=True):
            cases.local(owner).copy_(values)


def check_model(owners: Sequence[Any], buckets: int = 0, **sharding: Any) -> None:
    full = [cases.whole(owner) for owner in owners]
    again(owners, lambda p: cases.check_clip(owners, full, p, buckets=buckets, **sharding))


def one_mesh(rank: int, size: int, dtype: torch.dtype) -> None:
    full = gradients((7, 5), (11,), (1, 3), (64, 2), dtype=dtype)
    line = cases.mesh(size)
    for norm_type in cases.NORM_TYPES:
        owners = [cases.parameter(g, line, Shard(0)) for g in full]
        cases.check_clip(owners, full, norm_type)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_shards_on_one_mesh(two: World, four: World, dtype: torch.dtype) -> None:
    for world in (two, four):
        world.run(one_mesh, world.size, dtype)


def fsdp(rank: int, size: int, dtype: torch.dtype) -> None:
    check_model(models.sharded(cases.mesh(size), dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fsdp2(two: World, four: World, dtype: torch.dtype) -> None:
    for world in (two, four):
        world.run(fsdp, world.size, dtype)


def fsdp_mixed(rank: int, size: int) -> None:
    owners = models.mixed(cases.mesh(size))
    assert {owner.grad.dtype for owner in owners} == {torch.bfloat16, torch.float32}
    check_model(owners)


def test_fsdp2_of_mixed_dtypes(two: World) -> None:
    two.run(fsdp_mixed, 2)


def hsdp(rank: int) -> None:
    check_model(models.sharded(cases.mesh(2, 2, names="replicate shard")))


def test_hsdp(four: World) -> None:
    four.run(hsdp)


def tensor_parallel(rank: int, size: int) -> None:
    owners = models.tensor_parallel(cases.mesh(size, names="tp"))
    assert {isinstance(owner.grad, DTensor) for owner in owners} == {True, False}
    check_model(owners)


def test_tensor_parallel_with_plain_norms(two: World, four: World) -> None:
    for world in (two, four):
        world.run(tensor_parallel, world.size)


def sequence_parallel(rank: int) -> None:
    owners = models.sequence_parallel(cases.mesh(2, names="tp"))
    partial = [o for o in owners if any(p.is_partial() for p in o.grad.placements)]
    assert len(partial) >= 4
    check_model(owners, buckets=1)


def test_sequence_parallel_reduces_partial_gradients_in_one_bucket(two: World) -> None:
    two.run(sequence_parallel)


def replicated_data_parallel_tensor_parallel(rank: int) -> None:
    check_model(models.tensor_parallel(cases.mesh(2, 2, names="dp tp")["tp"]))


def test_tensor_parallel_inside_plain_data_parallel(four: World) -> None:
    four.run(replicated_data_parallel_tensor_parallel)


def fsdp_tp(rank: int) -> None:
    both = cases.mesh(2, 2, names="dp tp")
    owners = models.sharded_tensor_parallel(both["dp"], both["tp"])
    assert len({owner.grad.device_mesh.ndim for owner in owners}) == 2
    check_model(owners)


def test_fsdp2_and_tensor_parallel(four: World) -> None:
    four.run(fsdp_tp)


def fsdp_sp(rank: int) -> None:
    both = cases.mesh(2, 2, names="dp tp")
    check_model(models.sharded_sequence_parallel(both["dp"], both["tp"]))


def test_fsdp2_and_sequence_parallel(four: World) -> None:
    four.run(fsdp_sp)


def stages(rank: int) -> None:
    world = cases.mesh(2, 2, 2, names="pp dp tp")
    stage = world.get_local_rank("pp")
    owners = models.sharded_tensor_parallel(world["dp"], world["tp"], seed=stage)
    full = [cases.whole(owner) for owner in owners]
    both: list[Any] = [None] * 8
    dist.all_gather_object(both, full)
    again(owners, lambda p: cases.check_clip(owners, [*both[0], *both[4]], p))


def test_pipeline_stages_of_fsdp2_and_tensor_parallel(eight: World) -> None:
    eight.run(stages)


def plain_stages(rank: int) -> None:
    world = cases.mesh(2, 4, names="pp tp")
    stage = world.get_local_rank("pp")
    owners = models.tensor_parallel(world["tp"], seed=stage)
    full = [cases.whole(owner) for owner in owners]
    both: list[Any] = [None] * 8
    dist.all_gather_object(both, full)
    again(owners, lambda p: cases.check_clip(owners, [*both[0], *both[4]], p))


def test_pipeline_stages_with_plain_norms(eight: World) -> None:
    eight.run(plain_stages)


def unequal_stages(rank: int) -> None:
    """Stage 0 has three parameters, stage 1 one, and rank 3 of stage 1 no gradient at all."""
    world = cases.mesh(2, 2, names="pp dp")
    first, last = gradients((6, 2), (5,), (1,)), gradients((9,), seed=1)
    mine = first if world.get_local_rank("pp") == 0 else last
    for norm_type in cases.NORM_TYPES:
        owners = [cases.parameter(g, world["dp"], Shard(0)) for g in mine]
        cases.check_clip(owners, [*first, *last], norm_type)


def test_stages_of_different_parameters(four: World) -> None:
    four.run(unequal_stages)


def empty_stage(rank: int) -> None:
    world = cases.mesh(2, 2, names="pp dp")
    full = gradients((6, 2), (5,))
    mine = full if world.get_local_rank("pp") == 0 else []
    for norm_type in cases.NORM_TYPES:
        owners = [cases.parameter(g, world["dp"], Shard(0)) for g in mine]
        expected = cases.one_process_norm(full, norm_type)
        named = [(f"w{k}", owner) for k, owner in enumerate(owners)]
        total = gradclip.clip_(named, 0.1, norm_type, dtype=torch.float64, group=dist.group.WORLD)
        assert total.item() == expected


@pytest.mark.filterwarnings("ignore:`parameters` is empty")
def test_a_stage_without_parameters_takes_part(four: World) -> None:
    four.run(empty_stage)


def expert_parallel(rank: int) -> None:
    """Experts on meshes of their own, sharded twice and once, beside dense weights."""
    dense, sparse = cases.mesh(4, 2, names="dp tp"), cases.mesh(2, 4, names="efsdp ep")
    experts, more, weight, norm = gradients((8, 5, 3), (4, 2), (7, 5), (5,))
    for norm_type in cases.NORM_TYPES:
        owners = [
            cases.parameter(experts, sparse, Shard(1), Shard(0)),
            cases.parameter(more, sparse["ep"], Shard(0)),
            cases.parameter(weight, dense, Shard(0), Replicate()),
            cases.parameter(norm, dense["dp"], Shard(0)),
        ]
        cases.check_clip(owners, [experts, more, weight, norm], norm_type)


def test_experts_on_their_own_mesh(eight: World) -> None:
    eight.run(expert_parallel)


def plain_experts(rank: int) -> None:
    """Hand-made expert parallelism: each rank has its own plain expert, declared so."""
    line = cases.mesh(2)
    experts = gradients((3, 4), (3, 4), seed=5)
    (dense,) = gradients((6, 2))
    for norm_type in cases.NORM_TYPES:
        owners = [cases.parameter(dense, line, Shard(0)), cases.parameter(experts[rank])]
        cases.check_clip(owners, [dense, *experts], norm_type, plain="distinct")
        named = dict(zip(("dense", "expert"), owners, strict=True))
        for owner, values in zip(owners, (dense.chunk(2)[rank], experts[rank]), strict=True):
            cases.local(owner).copy_(values)
        total = gradclip.get_total_norm(
            [(name, cases.gradient(owner)) for name, owner in named.items()],
            norm_type,
            dtype=torch.float64,
            replicas={"expert": "distinct"},
        )
        assert total.item() == cases.one_process_norm([dense, *experts], norm_type)


def test_plain_experts_when_declared(two: World) -> None:
    two.run(plain_experts)


def four_experts(rank: int) -> None:
    """Norms 1, 2, 3, 4 over two ranks, wherever they live: sqrt(30)."""
    line = cases.mesh(2)
    full = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    halves = full.chunk(2)
    settings: list[tuple[list[Any], dict[str, Any]]] = [
        ([cases.parameter(full, line, Shard(0))], {}),
        ([cases.parameter(full, line, Replicate())], {}),
        ([cases.parameter(halves[rank])], {"group": dist.group.WORLD}),
        ([cases.parameter(full)] if rank == 0 else [], {"group": dist.group.WORLD}),
        ([cases.parameter(full)], {"group": dist.group.WORLD, "plain": "replicated"}),
    ]
    for owners, sharding in settings:
        total = gradclip.clip_(owners, 1.0, dtype=torch.float64, **sharding)
        assert total.item() == math.sqrt(30)


@pytest.mark.filterwarnings("ignore:`parameters` is empty")
def test_four_experts_wherever_they_live(two: World) -> None:
    two.run(four_experts)


def tied(rank: int) -> None:
    """An embedding of 800 elements of norm 20 on both stages: 20 once, not 28.28."""
    world = cases.mesh(2, 2, names="pp dp")
    full = torch.full((40, 20), 20 / math.sqrt(800))
    owner = cases.parameter(full, world["dp"], Shard(0))
    twice = gradclip.clip_([("embed", owner)], INF, dtype=torch.float64)
    assert twice.item() == cases.one_process_norm([full, full.clone()], 2.0)
    for said in (world["pp"], world.get_group("pp"), [rank % 2, rank % 2 + 2]):
        total = gradclip.clip_(
            [("embed", owner)], INF, dtype=torch.float64, replicas={"embed": said}
        )
        assert total.item() == cases.one_process_norm([full], 2.0)
    plain = cases.parameter(full)
    total = gradclip.clip_(
        [plain],
        INF,
        dtype=torch.float64,
        group=dist.group.WORLD,
        replicas=lambda name, p: "distinct" if rank == 3 else "elsewhere",
    )
    assert total.item() == cases.one_process_norm([full], 2.0)


def test_a_tied_embedding_counts_once_when_declared(four: World) -> None:
    four.run(tied)


def one_stage_copies(rank: int) -> None:
    """Replicate on one stage, Shard on the other: 64 + 128 = 192 elements of one."""
    world = cases.mesh(2, 2, names="pp ep")
    if world.get_local_rank("pp") == 0:
        owner = cases.parameter(torch.ones(64), world["ep"], Replicate())
    else:
        owner = cases.parameter(torch.ones(128), world["ep"], Shard(0))
    for norm_type, expected in ((1.0, 192.0), (2.0, math.sqrt(192)), (0.0, 192.0), (INF, 1.0)):
        total = gradclip.get_total_norm([cases.gradient(owner)], norm_type, dtype=torch.float64)
        assert total.item() == expected


def test_copies_on_one_stage_and_shards_on_the_other(four: World) -> None:
    four.run(one_stage_copies)


def flat_shards(rank: int) -> None:
    """ZeRO: each rank has a slice of one flat gradient; plain tensors and a group."""
    (flat,) = gradients((1001,))
    cuts = [0, 10, 500, 500, 1001]
    for norm_type in cases.NORM_TYPES:
        owner = cases.parameter(flat[cuts[rank] : cuts[rank + 1]])
        cases.check_clip([owner], [flat], norm_type, group=dist.group.WORLD)


def test_flat_shards_through_a_group(four: World) -> None:
    four.run(flat_shards)


def megatron_lists(rank: int) -> None:
    """Lists of main gradients, with the copies left out by the caller, through the hook."""
    (weight, norm) = gradients((8, 6), (6,))
    calls = []

    def reduce(vector: torch.Tensor, operation: str) -> None:
        assert vector.dtype == torch.int64
        assert vector.is_contiguous()
        calls.append(operation)
        kinds = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
        dist.all_reduce(vector, op=kinds[operation])

    for norm_type in cases.NORM_TYPES:
        owners = [cases.parameter(weight.chunk(2, dim=1)[rank])]
        owners += [cases.parameter(norm)] if rank == 0 else []
        for owner in owners:
            owner.main_grad, owner.grad = owner.grad, None  # type: ignore[attr-defined]
        calls.clear()
        total = gradclip.clip_(
            owners, 0.5, norm_type, dtype=torch.float64, grad="main_grad", reduce=reduce
        )
        assert total.item() == cases.one_process_norm([weight, norm], norm_type)
        assert calls == ["max" if norm_type == INF else "sum"]


def test_lists_of_gradients_through_a_hook(two: World) -> None:
    two.run(megatron_lists)


def islands(rank: int) -> None:
    """A mesh from `from_group` in a larger world: refused with the remedy, then settled."""
    world = cases.mesh(2, 2, names="dp tp")
    island = DeviceMesh.from_group(world.get_group("tp"), "cpu", mesh_dim_names=("tp",))
    (full,) = gradients((6, 3))
    owner = cases.parameter(full, island, Shard(0))
    with pytest.raises(ValueError, match="of a world of 4: pass group="):
        gradclip.clip_([("w", owner)], 1.0)
    with pytest.raises(gradclip.sharding.ShardedClipError, match=r'replicas=\{"w": "distinct"\}'):
        gradclip.clip_([("w", owner)], 1.0, group=dist.group.WORLD)
    said = {"w": world["dp"]}
    cases.check_clip([owner], [full], 2.0, group=dist.group.WORLD, replicas=lambda n, p: said["w"])
    owner = cases.parameter(full, island, Shard(0))
    cases.check_clip([owner], [full], 2.0, group=world.get_group("tp"))


def test_a_mesh_that_knows_no_root_is_refused(four: World) -> None:
    four.run(islands)


def outside(rank: int) -> None:
    """Ranks outside of a tensor's mesh take part and count nothing."""
    line, corner = cases.mesh(4), DeviceMesh("cpu", [0, 1])
    everywhere, there = gradients((5, 2), (6,))
    for norm_type in cases.NORM_TYPES:
        owners = [
            cases.parameter(everywhere, line, Shard(0)),
            cases.parameter(there, corner, Shard(0)),
        ]
        cases.check_clip(
            owners,
            [everywhere, there],
            norm_type,
            group=dist.group.WORLD,
            replicas=lambda name, p: "distinct" if p.device_mesh == corner else None,
        )


def test_ranks_outside_of_a_mesh(four: World) -> None:
    four.run(outside)


def twins(rank: int) -> None:
    """Equal meshes with different groups, and a flattened one, in one list."""
    one, other = cases.mesh(2, 2), cases.mesh(2, 2)
    assert one == other
    assert one.get_group(0) is not other.get_group(0)
    flat = one._flatten("flat")
    full = gradients((7, 3), (4, 4), (9,))
    for norm_type in cases.NORM_TYPES:
        owners = [
            cases.parameter(full[0], one, Replicate(), Shard(0)),
            cases.parameter(full[1], other, Shard(1), Shard(0)),
            cases.parameter(full[2], flat, Shard(0)),
        ]
        cases.check_clip(owners, full, norm_type)


def test_equal_meshes_and_a_flattened_one(four: World) -> None:
    four.run(twins)


def ones(rank: int) -> None:
    """All-ones gradients give numel^(1/p) for every layout; zero counting counts all."""
    both, line = cases.mesh(2, 2, names="dp tp"), cases.mesh(4)
    placed: list[tuple[Any, ...]] = [
        (both, Shard(0), Shard(1)), (both, Replicate(), Shard(0)), (both, Shard(0), Shard(0)),
        (both, Replicate(), Replicate()), (both["dp"], Shard(0)), (both["tp"], Replicate()),
        (line, Shard(0)), (line, Replicate()),
    ]  # fmt: skip
    for on, *where in placed:
        owner = cases.parameter(torch.ones(16, 4), on, *where)
        for norm_type, expected in ((1.0, 64.0), (2.0, 8.0), (3.0, 4.0), (0.0, 64.0), (INF, 1.0)):
            total = gradclip.get_total_norm([cases.gradient(owner)], norm_type)
            assert total.item() == expected, (where, norm_type)
        total = gradclip.clip_([owner], 4.0, eps=0.0)
        assert total.item() == 8.0
        assert bool((cases.local(owner) == 0.5).all())


def test_all_ones_count_their_elements(four: World) -> None:
    four.run(ones)


def partial_in_stages(rank: int) -> None:
    """Partial over both dimensions, sums and averages, two dtypes: one bucket each."""
    both = cases.mesh(2, 2)
    made = torch.Generator().manual_seed(rank)
    layouts = [(Partial(), Shard(0)), (Partial("avg"), Partial()), (Replicate(), Partial())]
    for norm_type in cases.NORM_TYPES:
        owners = []
        for where in layouts:
            for dtype in (torch.float32, torch.bfloat16):
                piece = torch.randint(-8, 8, (3, 5), generator=made).to(dtype)
                if where[0].is_replicate():
                    dist.broadcast(piece, rank % 2, group=both.get_group(0))
                owner = torch.nn.Parameter(torch.zeros(3, 5, dtype=dtype))
                owner.grad = None
                placed = DTensor.from_local(piece, both, list(where), run_check=False)
                holder = torch.nn.Parameter(placed.detach().clone())
                holder.grad = placed
                owners.append(holder)
        full = [cases.whole(owner) for owner in owners]
        cases.check_clip(owners, full, norm_type, buckets=4)


def test_partial_sums_and_averages(four: World) -> None:
    four.run(partial_in_stages)


def refused_partial(rank: int) -> None:
    line = cases.mesh(2)
    placed = DTensor.from_local(torch.ones(3), line, [Partial("max")], run_check=False)
    with pytest.raises(
        gradclip.sharding.ShardedClipError, match=r"rank 0: `w`: placement Partial\(max\)"
    ):
        gradclip.get_total_norm([("w", placed)])


def test_other_partial_reductions_are_refused(two: World) -> None:
    two.run(refused_partial)


def asynchronous(rank: int) -> None:
    """A gradient whose local tensor is still being filled by a collective is waited for."""
    line = cases.mesh(2)
    pending = DTensor.from_local(torch.full((4,), 1.0 + rank), line, [Partial()], run_check=False)
    filled = pending.redistribute(placements=[Replicate()], async_op=True)
    assert type(filled._local_tensor) is not torch.Tensor
    total = gradclip.get_total_norm([filled], dtype=torch.float64)
    assert total.item() == 6.0


def test_asynchronous_gradients_are_waited_for(two: World) -> None:
    two.run(asynchronous)


def own_and_scaled(rank: int) -> None:
    """Norms of each parameter, scaling by a given norm, values, a loss scale."""
    both = cases.mesh(2, 2, names="dp tp")
    full = gradients((7, 3), (6,), (2, 2))
    owners = [
        cases.parameter(full[0], both, Shard(0), Replicate()),
        cases.parameter(full[1], both["tp"], Shard(0)),
        cases.parameter(full[2]),
    ]
    for norm_type in (*cases.NORM_TYPES, 2.5):
        gradclip.grad_norms(owners, norm_type, dtype=torch.float64)
        with cases.counted_calls() as calls:
            each = gradclip.grad_norms(owners, norm_type, dtype=torch.float64)
        assert calls == ["all_reduce"]
        assert each.tolist() == [cases.one_process_norm([g], norm_type) for g in full]
    kept = [cases.local(owner).clone() for owner in owners]
    total = gradclip.get_total_norm([cases.gradient(o) for o in owners])
    with cases.counted_calls() as calls:
        gradclip.clip_grads_with_norm_(owners, 0.5, total)
    assert calls == []
    wanted = oracle.clipped(kept[0], cases.one_process_norm(full, 2.0), 0.5)
    assert torch.equal(cases.local(owners[0]), wanted)
    for owner, values in zip(owners, kept, strict=True):
        cases.local(owner).copy_(values)
    scaled = gradclip.clip_(owners, 0.5, scale=4.0, dtype=torch.float64)
    assert scaled.item() == cases.one_process_norm(full, 2.0) / 4
    gradclip.clip_grad_value_(owners, 0.01)
    assert float(cases.local(owners[0]).abs().max()) <= 0.01
    pending = DTensor.from_local(torch.ones(3), both["tp"], [Partial()], run_check=False)
    with pytest.raises(ValueError, match="its sum is still pending"):
        gradclip.clip_grad_value_([pending.requires_grad_()], 0.5, grad="data")


def test_the_other_functions(four: World) -> None:
    four.run(own_and_scaled)


def norms_of_stages(rank: int) -> None:
    """Each rank gets the norms of its own stage's parameters, from one collective."""
    world = cases.mesh(2, 2, names="pp dp")
    first, last = gradients((6, 2), (5,), (1,)), gradients((9,), seed=1)
    mine = first if world.get_local_rank("pp") == 0 else last
    owners = [cases.parameter(g, world["dp"], Shard(0)) for g in mine]
    each = gradclip.grad_norms(owners, dtype=torch.float64)
    assert each.tolist() == [cases.one_process_norm([g], 2.0) for g in mine]


def test_norms_of_the_parameters_of_stages(four: World) -> None:
    four.run(norms_of_stages)


def unwritten(rank: int) -> None:
    """Below the limit no bit and no version counter changes."""
    line = cases.mesh(2)
    (full,) = gradients((5, 2))
    owner = cases.parameter(full, line, Shard(0))
    version = cases.local(owner)._version
    gradclip.clip_([owner], 1e6)
    assert torch.equal(cases.local(owner), full.chunk(2)[rank])
    assert cases.local(owner)._version == version


def test_below_the_limit_nothing_is_written(two: World) -> None:
    two.run(unwritten)


def whole_meshes(rank: int) -> None:
    """A raw list of DTensors is distributed as it is; a module is named by its parameters."""
    line = cases.mesh(2)
    full = gradients((4, 3), (3,))
    tensors = [distribute_tensor(g, line, [Shard(0)]) for g in full]
    total = gradclip.get_total_norm(tensors, dtype=torch.float64)
    assert total.item() == cases.one_process_norm(full, 2.0)


def test_raw_gradients(two: World) -> None:
    two.run(whole_meshes)


def plain_alone(rank: int) -> None:
    """Plain gradients without a group are this process's own affair, as for torch."""
    owner = cases.parameter(torch.full((4,), 1.0 + rank))
    with cases.counted_calls() as calls:
        total = gradclip.clip_([owner], INF)
    assert calls == []
    assert total.item() == 2.0 * (1 + rank)
    other: Any = dist.new_group([0])
    if rank == 1:
        with pytest.raises(TypeError, match=r"expected a torch\.distributed process group"):
            gradclip.clip_([owner], INF, group=other)
    else:
        with cases.counted_calls() as calls:
            assert gradclip.clip_([owner], INF, group=other).item() == 2.0
        assert calls == [], "a group of one has nobody to ask"


def test_plain_gradients_alone(two: World) -> None:
    two.run(plain_alone)


def plain_owner(rank: int) -> None:
    """A DTensor gradient of a plain parameter: refused until the ranks are named."""
    line = cases.mesh(2)
    full = torch.tensor([3.0, 4.0])
    owner = torch.nn.Parameter(torch.zeros(2))
    owner.main_grad = distribute_tensor(full, line, [Shard(0)])  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="is a DTensor but its parameter is none; pass group="):
        gradclip.clip_([owner], 1.0, grad="main_grad")
    total = gradclip.clip_([owner], 1.0, grad="main_grad", group=dist.group.WORLD)
    assert total.item() == 5.0


def test_a_dtensor_gradient_of_a_plain_parameter(two: World) -> None:
    two.run(plain_owner)
