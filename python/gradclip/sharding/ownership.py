"""Which elements of each gradient this rank counts, so that every element weighs exactly one.

Inside a DTensor's mesh the placements tell: replicas share one piece, every other rank has its own.
Outside its mesh they cannot: the other ranks of the group may hold copies or other tensors. The
rules, each of which `replicas=` and `plain=` overrule:

- dimensions of the root mesh that the tensor's mesh lacks lead to copies, except distinct ones;
- a root that does not cover the group settles nothing and is refused;
- plain tensors beside DTensors are copies on every rank of the stage; alone, they are shards.

r copies share the reading: copy i counts elements [n * i // r, n * (i + 1) // r) of its n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gradclip.sharding import compat, copies, options, placements
from gradclip.sharding.errors import OwnershipError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: What `replicas=` says of a tensor that no other rank has.
DISTINCT = '"distinct"'


@dataclass(frozen=True)
class Ownership:
    """Copy `index` of `count`; count 0 holds nothing that counts."""

    index: int
    count: int
    partial: tuple[tuple[int, str], ...]
    reason: str

    def slice(self, elements: int) -> tuple[int, int]:
        """The range of the local tensor's row-major elements that this rank counts."""
        if self.count == 0:
            return 0, 0
        return elements * self.index // self.count, elements * (self.index + 1) // self.count


@dataclass
class Surroundings:
    """Where the ownership rules are applied: this rank, the group, and the distinct dimensions.

    `knows_ranks` is False where only a caller's `reduce=` knows the other ranks.
    """

    rank: int
    group: tuple[int, ...]
    distinct_dims: tuple[Any, ...] = ("pp",)
    knows_ranks: bool = True
    _known: dict[Any, Ownership] = field(default_factory=dict)
    _known_holders: dict[Any, tuple[int, ...]] = field(default_factory=dict)
    _layouts: dict[int, tuple[Any, copies.MeshLayout]] = field(default_factory=dict)

    def _layout(self, mesh: DeviceMesh) -> copies.MeshLayout:
        """`mesh_layout`, worked out once for each mesh object (which is kept, so ids stay good)."""
        if id(mesh) not in self._layouts:
            self._layouts[id(mesh)] = (mesh, mesh_layout(mesh))
        return self._layouts[id(mesh)][1]

    def of_dtensor(
        self, mesh: DeviceMesh, placed: Sequence[Any], copies_of: Any, name: str
    ) -> Ownership:
        """Ownership of the local piece of a DTensor on `mesh` with these placements.

        Args:
            mesh: the gradient's mesh.
            placed: the gradient's placements (not its parameter's).
            copies_of: None for the rules above, or what `replicas=` says of this parameter.
            name: how errors call the gradient.

        Raises:
            OwnershipError: naming the gradient and the argument that settles it.
        """
        layout = self._layout(mesh)
        key = (layout, tuple(placed), _hashable(copies_of))
        if key not in self._known:
            meanings = _meanings(placed, name)
            self._known[key] = self._dtensor(layout, meanings, copies_of, name)
        return self._known[key]

    def _dtensor(
        self,
        layout: copies.MeshLayout,
        meanings: Sequence[str],
        copies_of: Any,
        name: str,
    ) -> Ownership:
        unique = [dim for dim, meaning in enumerate(meanings) if meaning != placements.REPLICA]
        partial = tuple(
            (dim, meaning.partition(":")[2])
            for dim, meaning in enumerate(meanings)
            if meaning.startswith("partial")
        )
        if copies_of is not None and copies_of != "replicated":
            outer = self.ranks_of(copies_of, name)
            return self._overruled(layout, unique, partial, outer, name)
        if not set(self.group) <= set(layout.root):
            raise OwnershipError(_uncovered(layout, self.group, name))
        try:
            distinct = () if copies_of == "replicated" else self.distinct_digits(layout)
            held = copies.holders(layout, unique, distinct, self.rank)
        except ValueError as cause:
            raise OwnershipError(
                f"mesh of {name}: {cause}; pass {remedy(name, 'RANKS')}"
            ) from cause
        return self._share(held, partial, name, _reason(meanings, layout))

    def _overruled(
        self,
        layout: copies.MeshLayout,
        unique: Sequence[int],
        partial: tuple[tuple[int, str], ...],
        outer: tuple[int, ...],
        name: str,
    ) -> Ownership:
        """Outside the mesh `outer` hold copies (this rank among them), inside it as placed."""
        held = copies.holders(layout.alone(), unique, (), self.rank)
        inner = self._share(held, partial, name, "")
        if inner.count == 0 or not outer:
            return Ownership(0, 0, partial, "replicas=: counted on other ranks")
        place = outer.index(self.rank)
        return Ownership(
            place * inner.count + inner.index,
            len(outer) * inner.count,
            partial,
            f"replicas=: {len(outer)} outside its mesh, {inner.count} inside",
        )

    def _share(
        self,
        held: copies.Holders,
        partial: tuple[tuple[int, str], ...],
        name: str,
        reason: str,
    ) -> Ownership:
        missing = held.missing_from(self.group)
        if missing:
            raise OwnershipError(
                f"group= leaves out ranks {_brief(missing)}, which hold pieces of {name} that no"
                " rank of the group has; pass a group that holds the whole tensor"
            )
        same = held.of_piece(self.rank, self.group)
        if not same:
            return Ownership(0, 0, partial, "this rank is outside the tensor's mesh")
        return Ownership(same.index(self.rank), len(same), partial, reason)

    def holders_of(self, mesh: DeviceMesh, copies_of: Any) -> tuple[int, ...]:
        """The ranks of the group that hold any part of a tensor on `mesh`, in one order for all.

        The ranks of its mesh alone where the rules do not say who else holds replicas.
        """
        layout = self._layout(mesh)
        key = layout, "holders", _hashable(copies_of)
        if key not in self._known_holders:
            self._known_holders[key] = self._holders(layout, copies_of)
        return self._known_holders[key]

    def _holders(self, layout: copies.MeshLayout, copies_of: Any) -> tuple[int, ...]:
        members, held = frozenset(self.group), layout.ranks
        by_rule = copies_of is None or copies_of == "replicated"
        if by_rule and members <= frozenset(layout.root):
            try:
                distinct = () if copies_of == "replicated" else self.distinct_digits(layout)
                indices = [layout.root.index(rank) for rank in layout.ranks]
                covered = copies.digits_of(indices, len(layout.root))
                held = copies.block_of(layout.root, distinct, self.rank, covered)
            except ValueError:  # an irregular mesh, which is refused with its first gradient
                pass
        return tuple(rank for rank in held if rank in members)

    def of_plain(self, said: Any, roots: Sequence[copies.MeshLayout], name: str) -> Ownership:
        """Ownership of a plain tensor.

        Args:
            said: None for the rule, else what `plain=` or `replicas=` says: "replicated",
                "distinct", "elsewhere", or the ranks, group or mesh that hold copies.
            roots: layouts of the DTensors in the same list; none makes plain tensors shards.
            name: how errors call the gradient.
        """
        if said is None:
            said = "replicated" if roots else "distinct"
            why = "plain beside DTensors: a copy on every rank" if roots else "plain: a shard"
        else:
            why = "plain= or replicas= says so"
        if not self.knows_ranks and said not in ("distinct", "elsewhere"):
            raise OwnershipError(
                f"plain= or replicas= says that ranks hold replicas of {name}, but `reduce` alone"
                " does not tell which ranks there are; pass group= too"
            )
        same = self._one_stage(roots, name) if said == "replicated" else self.ranks_of(said, name)
        if not same:
            return Ownership(0, 0, (), "replicas=: counted on other ranks")
        return Ownership(same.index(self.rank), len(same), (), why)

    def stage_of(self, roots: Sequence[copies.MeshLayout]) -> tuple[int, ...]:
        """The ranks of the group in this rank's stage; all of them where the roots disagree."""
        stages = self._stages(roots)
        return stages.pop() if len(stages) == 1 else tuple(sorted(self.group))

    def _stages(self, roots: Sequence[copies.MeshLayout]) -> set[tuple[int, ...]]:
        stages = set()
        for layout in roots:
            if self.rank in layout.root and set(self.group) <= set(layout.root):
                distinct = self.distinct_digits(layout)
                block = copies.block_of(layout.root, distinct, self.rank)
                stages.add(tuple(sorted(set(block) & set(self.group))))
        return stages

    def _one_stage(self, roots: Sequence[copies.MeshLayout], name: str) -> tuple[int, ...]:
        """The ranks of the group in the same stage: along no distinct dimension apart."""
        stages = self._stages(roots)
        if len(stages) > 1:
            raise OwnershipError(
                f"{name} is a plain tensor, and the root meshes beside it disagree about its stage:"
                f' {sorted(stages)}; pass plain="distinct" or plain=RANKS, the ranks with copies'
            )
        return stages.pop() if stages else tuple(sorted(self.group))

    def ranks_of(self, said: Any, name: str) -> tuple[int, ...]:
        """The ranks of the group that `said` names as holders of copies; () for "elsewhere"."""
        if isinstance(said, str) and said == "elsewhere":
            return ()
        if isinstance(said, str) and said == "distinct":
            return (self.rank,)
        try:
            options.refuse_copies(said, f"copies of {name} are given as")
        except (TypeError, ValueError) as cause:
            raise OwnershipError(f"{cause}") from cause
        ranks = options.listed_ranks(said) or ()
        inside = tuple(sorted(set(ranks) & set(self.group)))
        if self.rank not in inside:
            raise OwnershipError(
                f"copies of {name} are said to be on ranks {_brief(ranks)}, but rank {self.rank}"
                ' has one too; name all of them, or say "elsewhere" on ranks that must not count'
            )
        return inside

    def distinct_digits(self, layout: copies.MeshLayout) -> tuple[copies.Digit, ...]:
        """The digits of the root along which ranks hold other tensors."""
        digits: tuple[copies.Digit, ...] = ()
        for dim in self.distinct_dims:
            ranks = None if isinstance(dim, str) else compat.mesh_ranks(dim)
            digits += layout.named_digit(dim) if ranks is None else layout.digits(ranks)
        return digits


def mesh_layout(mesh: DeviceMesh) -> copies.MeshLayout:
    """The plain-data description of `mesh` and its root."""
    root = compat.root_mesh(mesh)
    return copies.MeshLayout(
        root=compat.mesh_ranks(root),
        root_shape=tuple(root.mesh.shape),
        root_names=tuple(root.mesh_dim_names or ()),
        ranks=compat.mesh_ranks(mesh),
        shape=tuple(mesh.mesh.shape),
    )


def _meanings(placed: Sequence[Any], name: str) -> list[str]:
    try:
        return [placements.meaning(placement) for placement in placed]
    except ValueError as cause:
        raise OwnershipError(f"{name}: {cause}") from cause


def _hashable(said: Any) -> Any:
    ranks = options.listed_ranks(said)
    return said if ranks is None else ranks


def _reason(meanings: Sequence[str], layout: copies.MeshLayout) -> str:
    inside = ", ".join(f"{m} over {n}" for m, n in zip(meanings, layout.shape, strict=True))
    outside = len(layout.root) // len(layout.ranks)
    return inside if outside == 1 else f"{inside}; mesh is 1 of {outside} in its root"


def _uncovered(layout: copies.MeshLayout, group: tuple[int, ...], name: str) -> str:
    shape = "×".join(map(str, layout.root_shape))
    outside = sorted(set(group) - set(layout.root))
    return (
        f"{name} lives on a mesh whose root ({shape}) covers ranks {_brief(layout.root)} but not"
        f" {_brief(outside)} of the group, so its copies cannot be told: pass"
        f" {remedy(name, DISTINCT)} when the others hold other tensors,"
        f" {remedy(name, 'RANKS')} with the ranks or the group that hold copies of it, or group="
        " to clip over its mesh"
    )


def remedy(name: str, said: str) -> str:
    """The argument that settles who holds copies of a gradient, as one would write it."""
    key = f'"{name[1:-1]}"' if name.startswith("`") else "PARAMETER"
    return f"replicas={{{key}: {said}}}"


def _brief(ranks: Sequence[int], shown: int = 8) -> str:
    listed = ", ".join(map(str, ranks[:shown]))
    return f"[{listed}, …]" if len(ranks) > shown else f"[{listed}]"
