"""A model of the protocol: random scenes in which ranks differ, against a plain reference.

Each scene ends in one of two ways, within a limit of time: all ranks return the oracle's bits and
have clipped, or all raise the same message and no gradient has changed. The next good call is
right. The reference knows from the scene alone which of the two it must be.
"""

from __future__ import annotations

import itertools
import math
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import gradclip
from gradclip import engine
from gradclip.sharding import ShardedClipError, contribution
from tests import oracle
from tests.distributed.threads import ThreadWorld
from tests.distributed.world import World

pytestmark = pytest.mark.filterwarnings("ignore")

INF = math.inf
SHAPES = ((4,), (5,), (1,), (2, 3), (3, 2))
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16)
NORM_TYPES = (0.0, 1.0, 2.0, 2.0, 3.0, INF, -INF)
FUNCTIONS = ("clip_", "clip_", "Clipper", "get_total_norm", "grad_norms")
ALL, ROWS, COLUMNS, FLAT = "all", "rows", "columns", "flat"


@dataclass(frozen=True)
class Tensor:
    """One parameter: its mesh (None for plain), a letter for each mesh dimension, and its values.

    s: sharded along dimension 0; z: the same after the next mesh dimension; r: replicated; p: a
    pending sum.
    """

    name: str
    mesh: str | None
    placed: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int


@dataclass(frozen=True)
class Scene:
    """What all ranks hold and call, and how some of them differ."""

    size: int
    tensors: tuple[Tensor, ...]
    function: str
    norm_type: float
    fraction: float
    named: bool
    options: dict[str, Any]
    differences: tuple[tuple[int, str, int], ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)


class Reduce:
    """A caller's `reduce=` between threads; all ranks get what the first one's operation gives."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=10.0)
        self.vectors: list[Any] = [None] * size
        self.operations: list[str] = [""] * size

    def of(self, rank: int) -> Callable[[torch.Tensor, str], None]:
        def reduce(vector: torch.Tensor, operation: str) -> None:
            self.vectors[rank], self.operations[rank] = vector.clone(), operation
            self.barrier.wait()
            stacked = torch.stack(self.vectors)
            result = stacked.sum(0) if self.operations[0] == "sum" else stacked.amax(0)
            self.barrier.wait()
            vector.copy_(result)

        return reduce


def meshes(rank: int) -> dict[str, Any]:
    size = dist.get_world_size()
    kept: dict[str, Any] = {ALL: init_device_mesh("cpu", (size,), mesh_dim_names=("x",))}
    kept["reduce"] = hooks[size].of(rank)
    if size == 4:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        kept |= {"both": both, ROWS: both["a"], COLUMNS: both["b"], FLAT: both._flatten(FLAT)}
    return kept


def coordinates(size: int, mesh: str | None, rank: int) -> tuple[tuple[int, int], ...]:
    """(coordinate, size) along each dimension of a mesh."""
    if mesh is None:
        return ()
    if mesh in (ALL, FLAT):
        return ((rank, size),)
    both = ((rank // 2, 2), (rank % 2, 2))
    return {"both": both, ROWS: both[:1], COLUMNS: both[1:]}[mesh]


def full_values(tensor: Tensor, salt: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(tensor.seed * 1000 + salt)
    values = torch.randint(-16, 17, tensor.shape, generator=made)
    values[values == 0] = 3
    return (values / 8).to(tensor.dtype)


def are_shards(scene: Scene) -> bool:
    """Whether plain tensors differ between ranks."""
    alone = all(tensor.mesh is None for tensor in scene.tensors)
    return alone and scene.options.get("plain") != "replicated"


def local_values(scene: Scene, tensor: Tensor, rank: int) -> torch.Tensor:
    """What a rank holds of a gradient before anything differs."""
    if tensor.mesh is None:
        return full_values(tensor, 1 + rank if are_shards(scene) else 0)
    where = coordinates(scene.size, tensor.mesh, rank)
    salt = 0
    for (coordinate, size), letter in zip(where, tensor.placed, strict=True):
        salt = salt * size + (coordinate if letter == "p" else 0)
    values = full_values(tensor, salt)
    cuts = list(zip(where, tensor.placed, strict=True))
    for (coordinate, size), letter in cuts[::-1] if "z" in tensor.placed else cuts:
        if letter in "sz":
            parts = values.chunk(size, dim=0)
            values = parts[coordinate] if coordinate < len(parts) else values[:0]
    return values.clone()


LETTERS: dict[str, Callable[[], Any]] = {
    "s": lambda: Shard(0),
    "z": lambda: _StridedShard(0, split_factor=2),
    "r": Replicate,
    "p": Partial,
}


def build(scene: Scene, tensor: Tensor, rank: int, kept: dict[str, Any]) -> Any:
    """A parameter with its gradient, on one rank."""
    values = local_values(scene, tensor, rank)
    if tensor.mesh is None:
        owner = nn.Parameter(torch.zeros_like(values))
        owner.grad = values
        return owner
    full = full_values(tensor)
    grown: Any = {"shape": full.shape, "stride": full.stride(), "run_check": False}
    on, placed = kept[tensor.mesh], [LETTERS[letter]() for letter in tensor.placed]
    weights = [LETTERS["r" if letter == "p" else letter]() for letter in tensor.placed]
    owner = nn.Parameter(DTensor.from_local(torch.zeros_like(values), on, weights, **grown))
    owner.grad = DTensor.from_local(values, on, placed, **grown)
    return owner


def logical(scene: Scene, tensor: Tensor, absent: frozenset[int]) -> list[torch.Tensor]:
    """The elements of a gradient that count, each once; `absent` ranks have no gradient."""
    if tensor.mesh is None:
        if are_shards(scene):
            ranks = [r for r in range(scene.size) if r not in absent]
            return [local_values(scene, tensor, r) for r in ranks]
        return [local_values(scene, tensor, 0)] if 0 not in absent else []
    pieces: dict[tuple[int, ...], dict[tuple[int, ...], torch.Tensor]] = {}
    for rank in range(scene.size):
        where = coordinates(scene.size, tensor.mesh, rank)
        cuts = list(zip(where, tensor.placed, strict=True))
        shard = tuple(coordinate for (coordinate, _), letter in cuts if letter in "sz")
        summand = tuple(coordinate for (coordinate, _), letter in cuts if letter == "p")
        values = local_values(scene, tensor, rank)
        if rank in absent:
            if "p" not in tensor.placed:
                continue
            values = torch.zeros_like(values)
        pieces.setdefault(shard, {})[summand] = values
    return [sum(summands.values()) for summands in pieces.values()]  # type: ignore[misc]


@dataclass(frozen=True)
class Difference:
    """One way in which a rank may differ, and whether all ranks must then raise."""

    raises: bool
    applies: Callable[[Scene, Tensor, int], bool] = lambda scene, tensor, rank: True


def has_replicas(scene: Scene, tensor: Tensor, rank: int) -> bool:
    if tensor.mesh is None:
        return not are_shards(scene)
    return "r" in tensor.placed or tensor.mesh in (ROWS, COLUMNS)


def only_pending(scene: Scene, tensor: Tensor, rank: int) -> bool:
    return "p" in tensor.placed and not has_replicas(scene, tensor, rank)


def shards(scene: Scene, tensor: Tensor, rank: int) -> bool:
    return not has_replicas(scene, tensor, rank) and "p" not in tensor.placed


def is_mesh(scene: Scene, tensor: Tensor, rank: int) -> bool:
    return tensor.mesh is not None


def nonempty_replica(scene: Scene, tensor: Tensor, rank: int) -> bool:
    full = local_values(scene, tensor, rank)
    return has_replicas(scene, tensor, rank) and full.numel() > 0


hooks = {size: Reduce(size) for size in (2, 3, 4)}

DIFFERENCES: dict[str, Difference] = {
    "shard without gradient": Difference(False, shards),
    "pending without gradient": Difference(False, only_pending),
    "other order": Difference(False, lambda scene, tensor, rank: scene.named),
    "nan": Difference(False, shards),
    "int as number": Difference(False),
    "replica without gradient": Difference(True, has_replicas),
    "replica changed": Difference(True, nonempty_replica),
    "replica of another dtype": Difference(True, has_replicas),
    "pending of another dtype": Difference(True, lambda s, t, r: "p" in t.placed),
    "pending is a replica": Difference(True, lambda s, t, r: "p" in t.placed),
    "pending is sparse": Difference(True, lambda s, t, r: "p" in t.placed),
    "not listed": Difference(True, is_mesh),
    "integer gradient": Difference(True),
    "other max_norm": Difference(True, lambda s, t, r: s.function in ("clip_", "Clipper")),
    "other norm_type": Difference(True),
    "other eps": Difference(True, lambda s, t, r: s.function in ("clip_", "Clipper")),
    "other function": Difference(True),
    "bad number": Difference(True),
    "bad entry": Difference(True, lambda s, t, r: s.function != "Clipper"),
    "bad option": Difference(True, lambda s, t, r: s.function != "Clipper"),
    "unknown option": Difference(True, lambda s, t, r: s.function != "Clipper"),
    "failing generator": Difference(True, lambda s, t, r: s.function != "Clipper"),
    "failing gradient": Difference(True, lambda s, t, r: s.function != "get_total_norm"),
    "failing sums": Difference(True),
    "failing read": Difference(True),
    "failing digests": Difference(True, nonempty_replica),
}


def must_fail(scene: Scene, kind: str, index: int) -> bool:
    """Whether all ranks must raise; raw gradients say nothing of those that are not listed."""
    absent = kind.endswith("without gradient") and scene.tensors[index].mesh is not None
    return DIFFERENCES[kind].raises or (absent and scene.function == "get_total_norm")


def random_scene(seed: int, size: int) -> Scene:
    chosen = random.Random(seed)
    tensors = []
    flavour = chosen.choice(
        ("mesh", "mesh", "mesh", "distinct", "replicated", "undeclared", "hook")
    )
    for index in range(chosen.randint(1, 4)):
        mesh: str | None = None
        placed = ""
        if flavour == "mesh" and not (index and chosen.random() < 0.2):
            mesh = ALL if size != 4 else chosen.choice((ALL, "both", "both", ROWS, COLUMNS, FLAT))
            dims = 2 if mesh == "both" else 1
            placed = "".join(chosen.choice("srrpp") for _ in range(dims))
            placed = "zs" if placed == "ss" and chosen.random() < 0.5 else placed
        shape, dtype = chosen.choice(SHAPES), chosen.choice(DTYPES)
        tensors.append(Tensor(f"w{index}", mesh, placed, shape, dtype, chosen.randrange(10**6)))
    options: dict[str, Any] = {}
    if flavour in ("distinct", "replicated"):
        options["plain"] = flavour
    if flavour == "hook":
        options |= {"plain": "distinct", "reduce": chosen.random() < 0.5}
    function = chosen.choice(FUNCTIONS)
    scene = Scene(
        size,
        tuple(tensors),
        function,
        chosen.choice(NORM_TYPES),
        chosen.choice((0.5, 0.5, 2.0)),
        chosen.random() < 0.7,
        options,
    )
    applicable = {}
    for kind, difference in DIFFERENCES.items():
        everywhere = itertools.product(range(len(tensors)), range(size))
        places = [(i, r) for i, r in everywhere if difference.applies(scene, tensors[i], r)]
        if places:
            applicable[kind] = places
    kinds = chosen.sample(sorted(applicable), chosen.choice((0, 1, 1, 1, 2)))
    differences = []
    for kind in kinds:
        index, rank = chosen.choice(applicable[kind])
        differences.append((rank, kind, index))
    return replace(scene, differences=tuple(differences))


failing = threading.local()


@contextmanager
def failing_steps() -> Iterator[None]:
    """Steps of this process fail on the threads that ask for it."""
    sharded: Any = contribution
    tensors: Any = torch.Tensor
    originals = engine.sums, engine.sums_each, engine.digests, sharded.Local

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **named: Any) -> Any:
            if getattr(failing, "step", None) == name:
                raise MemoryError(f"no memory for {name}")
            return original(*arguments, **named)

        return step

    engine.sums = wrap("sums", engine.sums)
    engine.sums_each = wrap("sums", engine.sums_each)
    engine.digests = wrap("digests", engine.digests)
    sharded.Local = wrap("read", sharded.Local)
    tensors.read_grad = property(read_gradient)
    try:
        yield
    finally:
        del tensors.read_grad
        engine.sums, engine.sums_each, engine.digests, sharded.Local = originals


def read_gradient(owner: Any) -> Any:
    """What parameters of this model keep their gradient behind."""
    if getattr(owner, "fails", False):
        raise LookupError("no gradient here")
    return owner.main_grad


@dataclass
class Ended:
    """How a call ended on one rank."""

    message: str | None
    total: list[float] | None
    before: list[torch.Tensor | None]
    after: list[torch.Tensor | None]


def play(scene: Scene, rank: int, kept: dict[str, Any], limit: float) -> list[Ended]:
    """One rank's part in a scene, and in the same call after every difference was mended."""
    owners = [build(scene, tensor, rank, kept) for tensor in scene.tensors]
    listed = list(range(len(owners)))
    numbers: dict[str, Any] = {"max_norm": limit, "norm_type": scene.norm_type, "eps": 0.0}
    options = ranks_of(scene, kept)
    function, generator, failing.step = scene.function, None, None
    entries: list[Any] | None = None
    for who, kind, index in scene.differences:
        if who != rank:
            continue
        owner, tensor = owners[index], scene.tensors[index]
        local = owner.grad._local_tensor if tensor.mesh and owner.grad is not None else owner.grad

        def put(values: torch.Tensor, placed: Any = None) -> None:
            if tensor.mesh is None:  # noqa: B023
                owner.main_grad = values  # noqa: B023
                return
            full, was = full_values(tensor), owner.grad  # noqa: B023
            where = was.placements if placed is None else placed
            made = DTensor.from_local(
                values,
                was.device_mesh,
                where,
                shape=full.shape,
                stride=full.stride(),
                run_check=False,
            )
            owner.main_grad = made  # noqa: B023

        if (
            local is None
            and "gradient" not in kind
            and kind.split()[0] in ("replica", "pending", "nan")
        ):
            continue
        if kind in (
            "shard without gradient",
            "pending without gradient",
            "replica without gradient",
        ):
            owner.grad = None
        elif kind == "nan" and local.numel():
            local.view(-1)[-1] = math.nan
        elif kind == "replica changed":
            local.view(-1)[0] += 1
        elif kind in ("replica of another dtype", "pending of another dtype"):
            other = torch.float64 if local.dtype != torch.float64 else torch.float32
            put(local.to(other))
        elif kind == "pending is a replica":
            put(
                local.clone(),
                [Replicate() if letter == "p" else LETTERS[letter]() for letter in tensor.placed],
            )
        elif kind == "pending is sparse":
            put(local.clone())
            owner.main_grad._local_tensor = local.to_sparse()
        elif kind == "integer gradient":
            if owner.grad is not None:
                put(local.to(torch.int32))
            else:
                owner.main_grad = torch.ones(2, dtype=torch.int32)
        elif kind == "int as number":
            numbers["eps"] = 0
        elif kind == "not listed":
            listed = [k for k in listed if k != index]
        elif kind == "other order":
            listed = listed[::-1]
        elif kind == "other max_norm":
            numbers["max_norm"] = limit * 0.5 if limit < INF else 1.0
        elif kind == "other norm_type":
            numbers["norm_type"] = 5.0
        elif kind == "other eps":
            numbers["eps"] = 0.5
        elif kind == "other function":
            function = "grad_norms" if function != "grad_norms" else "get_total_norm"
        elif kind == "bad number":
            numbers["norm_type"] = 10**400 if index % 2 else "many"
        elif kind == "bad entry":
            entries = ["junk"]
        elif kind == "bad option":
            options["check_replicas"] = "often"
        elif kind == "unknown option":
            options["grup"] = None
        elif kind == "failing generator":
            generator = ValueError("file \udcff missing")
        elif kind == "failing gradient":
            owner.fails = True
        elif kind.startswith("failing "):
            failing.step = kind.split()[1]
    attribute = "read_grad"
    for owner in owners:
        if not hasattr(owner, "main_grad"):
            owner.main_grad = owner.grad
    before = snapshot(owners)
    named: list[Any] = [
        (scene.tensors[k].name, owners[k]) if scene.named else owners[k] for k in listed
    ]
    if entries:
        named = named + entries
    given: Any = walked(named, generator) if generator else named
    try:
        total = call(function, given, attribute, numbers, options, scene)
        message = None
    except ShardedClipError as error:
        total, message = None, str(error)
    finally:
        failing.step = None
    first = Ended(message, total, before, snapshot(owners))
    for owner, tensor in zip(owners, scene.tensors, strict=True):
        owner.main_grad, owner.fails = build(scene, tensor, rank, kept).grad, False
    before = snapshot(owners)
    good = [(t.name, o) if scene.named else o for t, o in zip(scene.tensors, owners, strict=True)]
    numbers = {"max_norm": limit, "norm_type": scene.norm_type, "eps": 0.0}
    total = call(scene.function, good, attribute, numbers, ranks_of(scene, kept), scene)
    return [first, Ended(None, total, before, snapshot(owners))]


def ranks_of(scene: Scene, kept: dict[str, Any]) -> dict[str, Any]:
    """The options about ranks of a scene."""
    options = {"group": dist.group.WORLD, **scene.options}
    if "reduce" in options:
        options["group"] = options["group"] if options["reduce"] else None
        options["reduce"] = kept["reduce"]
    return options


def walked(entries: Sequence[Any], error: Exception) -> Iterator[Any]:
    yield from entries
    raise error


def call(
    function: str,
    given: Any,
    attribute: str,
    numbers: dict[str, Any],
    options: dict[str, Any],
    scene: Scene,
) -> list[float]:
    more: Any = {"dtype": torch.float64, **options}
    limit, norm_type, eps = numbers["max_norm"], numbers["norm_type"], numbers["eps"]
    if function == "get_total_norm":
        if isinstance(given, list):
            given = [gradient_of(entry, attribute) for entry in given]
            given = [entry for entry in given if entry is not None]
        result = gradclip.get_total_norm(given, norm_type, **more)
        return [result.item()]
    if function == "grad_norms":
        return [
            float(norm) for norm in gradclip.grad_norms(given, norm_type, grad=attribute, **more)
        ]
    if function == "Clipper":
        clipper: Any = gradclip.Clipper(given, INF, grad=attribute, eps=0.0, **more)
        clipper.max_norm, clipper.norm_type, clipper.eps = limit, norm_type, eps
        return [clipper.clip_().item()]
    total = gradclip.clip_(given, limit, norm_type, eps=eps, grad=attribute, **more)
    return [total.item()]


def gradient_of(entry: Any, attribute: str) -> Any:
    if isinstance(entry, tuple):
        gradient = getattr(entry[1], attribute)
        return None if gradient is None else (entry[0], gradient)
    return getattr(entry, attribute, entry)


def snapshot(owners: Sequence[Any]) -> list[torch.Tensor | None]:
    kept: list[torch.Tensor | None] = []
    for owner in owners:
        gradient = owner.main_grad
        local = getattr(gradient, "_local_tensor", gradient)
        kept.append(None if local is None else local.detach().to_dense().clone())
    return kept


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return bool(torch.equal(one.nan_to_num(77.0), other.nan_to_num(77.0)))


def expected_norms(scene: Scene) -> tuple[list[float], float]:
    """The norm of each tensor, and of all."""
    everything: list[torch.Tensor] = []
    each = []
    has_nan = []
    for index, tensor in enumerate(scene.tensors):
        absent = frozenset(
            rank
            for rank, kind, where in scene.differences
            if where == index and kind.endswith("without gradient")
        )
        spoiled = any(
            kind == "nan"
            and where == index
            and rank not in absent
            and local_values(scene, tensor, rank).numel()
            for rank, kind, where in scene.differences
        )
        parts = logical(scene, tensor, absent)
        has_nan.append(spoiled)
        each.append(math.nan if spoiled else exact_norm(parts, scene.norm_type))
        everything += parts
    total = math.nan if any(has_nan) else exact_norm(everything, scene.norm_type)
    return each, total


def exact_norm(parts: list[torch.Tensor], norm_type: float) -> float:
    parts = [part for part in parts if part.numel()]
    if not parts:
        return 0.0
    if norm_type == 3.0:
        return gradclip.get_total_norm(parts, 3.0, dtype=torch.float64).item()
    return oracle.total_norm(parts, norm_type)


def in_threads(world: ThreadWorld) -> Callable[[Scene, float], list[list[Ended]]]:
    return lambda scene, limit: world.run(lambda rank, kept: play(scene, rank, kept, limit))


def check(run: Callable[[Scene, float], list[list[Ended]]], scene: Scene) -> None:
    """Run a scene on all ranks; everything that must hold of how it ends."""
    _, total = expected_norms(scene)
    limit = scene.fraction * total if 0 < total < INF else 1.0
    ended = run(scene, limit)
    must_raise = any(must_fail(scene, kind, index) for _, kind, index in scene.differences)
    check_outcome(scene, [first for first, _ in ended], limit, must_raise)
    check_outcome(replace(scene, differences=()), [second for _, second in ended], limit, False)


def check_outcome(scene: Scene, ended: list[Ended], limit: float, must_raise: bool) -> None:
    messages = {end.message for end in ended}
    assert len(messages) == 1, (scene, messages)
    assert (ended[0].message is not None) == must_raise, (scene, ended[0].message)
    each, total = expected_norms(scene)
    coefficient = oracle.coefficient(total, limit, 0.0) if total == total else math.nan
    for rank, end in enumerate(ended):
        wanted = [total]
        if scene.function == "grad_norms":
            turns = [kind for who, kind, _ in scene.differences if who == rank]
            wanted = each[::-1] if "other order" in turns else each
        for got, want in zip(end.total or wanted, wanted, strict=True):
            assert got == want or (got != got and want != want), (scene, end.total, wanted)
        for one, other in zip(end.before, end.after, strict=True):
            clipped = one
            writes = scene.function in ("clip_", "Clipper") and not must_raise
            if one is not None and writes and coefficient != 1:
                clipped = oracle.clipped(one, total, limit, 0.0)
            assert same(clipped, other), (scene, one, other, clipped)


processes: dict[int, dict[str, Any]] = {}


def play_in_process(rank: int, size: int, seed: int, limit: float) -> list[Ended]:
    """One rank's part in a scene, in a process of its own."""
    if size not in processes:
        processes[size] = meshes(rank)
    with warnings.catch_warnings(), failing_steps():
        warnings.simplefilter("ignore")
        return play(gloo_scene(seed, size), rank, processes[size], limit)


def gloo_scene(seed: int, size: int) -> Scene:
    """A random scene that needs no memory shared by ranks."""
    scene = random_scene(10_000 + seed, size)
    return replace(scene, options={k: v for k, v in scene.options.items() if k != "reduce"})


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 3, 4])
def test_scenes_over_processes(size: int, two: World, three: World, four: World) -> None:
    ranks = {2: two, 3: three, 4: four}[size]

    def run(scene: Scene, limit: float) -> list[list[Ended]]:
        return ranks.run(play_in_process, size, seeds[-1], limit)

    seeds = []
    for seed in range(24):
        seeds.append(seed)
        check(run, gloo_scene(seed, size))


@pytest.fixture(scope="module", params=[2, 3, 4])
def world(request: pytest.FixtureRequest) -> Iterator[ThreadWorld]:
    with ThreadWorld(request.param, meshes) as made, failing_steps():
        yield made


@pytest.mark.parametrize("chunk", range(10))
def test_every_scene_has_one_outcome(world: ThreadWorld, chunk: int) -> None:
    for seed in range(100 * chunk, 100 * (chunk + 1)):
        check(in_threads(world), random_scene(seed, world.size))
