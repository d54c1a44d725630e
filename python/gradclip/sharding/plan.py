"""The plan of a list of parameters: whose gradients this rank counts, and which part of each.

Made once from the parameters and refreshed at each call from the gradients that there are: a
missing gradient, a new tensor of the same layout or a newly frozen layer change no decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradclip.sharding import absent, compat
from gradclip.sharding.absent import ABSENT
from gradclip.sharding.agreement import Balance, added, balanced_share, wide_tag
from gradclip.sharding.copies import MeshLayout
from gradclip.sharding.options import Rules
from gradclip.sharding.ownership import Ownership, Surroundings, mesh_layout
from gradclip.sharding.pending import PendingGradient, pending_gradient
from gradclip.sharding.replicas import Replica
from gradclip.sharding.transport import Transport


class Entry:
    """One parameter of the plan, with what was decided of its gradient so far.

    Attributes:
        label: how errors call it.
        identity: what all ranks call it: its name, or its position among parameters of its kind.
        name: its name, or None.
        listed: this rank's share of the balance by which all ranks that hold the parameter find
            out whether each lists it alike.
        holders: the ranks of the group that hold a part of it; () for plain shards.
        may_be_pending: whether its gradient may be a pending sum that this rank does not have.
        spec: the DTensor spec of its gradient.
        share: which elements this rank counts; None before its first gradient.
        replica: its outline among replicas; None if it has none.
        outline: this rank's share of the balance of replicas' outlines.
    """

    __slots__ = (
        "holders",
        "identity",
        "label",
        "listed",
        "may_be_pending",
        "name",
        "option",
        "outline",
        "replica",
        "share",
        "spec",
    )

    def __init__(self, name: str | None, index: int) -> None:
        self.name = name
        self.label = f"`{name}`" if name is not None else f"parameter {index}"
        self.identity = self.label
        self.listed: Balance = (0, 0)
        self.holders: tuple[int, ...] = ()
        self.may_be_pending = False
        self.option: Any = None
        self.spec: Any = None
        self.share: Ownership | None = None
        self.replica: Replica | None = None
        self.outline: Balance = (0, 0)


@dataclass(frozen=True)
class Gathered:
    """The gradients of one call: local tensors, and the range of each that counts here.

    Attributes:
        entries: the parameters that have a gradient.
        tensors: their local tensors.
        owned: the range of elements that counts of each; None for all.
        replicas: positions in `entries` of gradients that other ranks hold too.
        pending: the gradients whose sum is pending.
        missing: parameters without a gradient that may be pending on other ranks.
        outline: this rank's share of the balance of replicas' outlines.
        cause: what is wrong with a gradient on this rank.
    """

    entries: list[Entry]
    tensors: list[torch.Tensor]
    owned: list[tuple[int, int] | None]
    replicas: list[int]
    pending: list[PendingGradient]
    missing: list[Entry]
    outline: Balance
    cause: Exception | None


class Plan:
    """The parameters of one clip over ranks; keeps no parameter alive.

    Args:
        named: (name or None, parameter) pairs, each parameter once.
        transport: how vectors are reduced.
        rules: the caller's options.
        attribute: where the gradient is found; None when the tensors are gradients themselves.
    """

    def __init__(
        self,
        named: Sequence[tuple[str | None, torch.Tensor]],
        transport: Transport,
        rules: Rules,
        attribute: str | None = "grad",
    ) -> None:
        self.transport = transport
        self.rules = rules
        self.attribute = attribute
        ranks = transport.ranks or (transport.rank,)
        known = bool(transport.ranks)
        self.around = Surroundings(transport.rank, ranks, rules.distinct_dims, known)
        self.entries = [Entry(name, index) for index, (name, _) in enumerate(named)]
        self.layouts = layouts_of(parameter for _, parameter in named)
        kinds: Counter[str] = Counter()
        for entry, (_, parameter) in zip(self.entries, named, strict=True):
            if entry.name is None:
                kind = "DTensor" if compat.is_dtensor(parameter) else "tensor"
                entry.identity = f"{kind} {kinds[kind]}"
                kinds[kind] += 1
            self._list(entry, parameter)
        self.listed = added(entry.listed for entry in self.entries)
        #: Replicas whose contents were not compared yet, or were all zero: uses until now.
        self.fresh: dict[Entry, int] = {}
        self._outlines: tuple[list[Entry], Balance] = ([], (0, 0))

    def _list(self, entry: Entry, parameter: torch.Tensor) -> None:
        entry.option = self.rules.option_of(entry.name, parameter)
        spec: Any = getattr(parameter, "_spec", None)
        if spec is None:
            return
        entry.holders = self.around.holders_of(spec.mesh, entry.option)
        placed = spec.placements
        entry.may_be_pending = self.attribute is not None and any(
            placement.is_replicate() and spec.mesh.size(dim) > 1
            for dim, placement in enumerate(placed)
        )
        if self.transport.rank in entry.holders:
            index, count = entry.holders.index(self.transport.rank), len(entry.holders)
            described = (*map(str, placed), *spec.mesh.mesh.shape)
            outline = entry.identity, tuple(parameter.shape), str(parameter.dtype), described
            entry.listed = balanced_share(index, count, "listed", *outline)

    def gather(self, parameters: Sequence[torch.Tensor]) -> Gathered:
        """The gradients as they are now; an error is kept as `cause`, for all ranks to hear.

        `parameters` are those of the plan, in its order.
        """
        found = Gathered([], [], [], [], [], [], (0, 0), None)
        cause: Exception | None = None
        changed = False
        for entry, parameter in zip(self.entries, parameters, strict=True):
            try:
                gradient: Any = parameter
                if self.attribute is not None:
                    gradient = getattr(parameter, self.attribute, ABSENT)
                if gradient is ABSENT:
                    self._refuse_absent(parameters)
                elif gradient is not None:
                    changed |= self._add(found, entry, gradient)
                elif entry.may_be_pending:
                    found.missing.append(entry)
            except Exception as error:
                cause = cause or error
        outline = self._outline_of([found.entries[k] for k in found.replicas], changed)
        return Gathered(
            found.entries,
            found.tensors,
            found.owned,
            found.replicas,
            found.pending,
            found.missing,
            outline,
            cause,
        )

    def _outline_of(self, replicas: list[Entry], changed: bool) -> Balance:
        """The balance of replicas' outlines: that of the last call, if it is of the same ones."""
        known, balance = self._outlines
        if changed or known != replicas:
            balance = added(entry.outline for entry in replicas)
            self._outlines = replicas, balance
        return balance

    def _refuse_absent(self, parameters: Sequence[torch.Tensor]) -> None:
        assert self.attribute is not None
        names = [entry.name for entry in self.entries if entry.name is not None]
        absent.refuse(parameters, self.attribute, names or None)

    def _add(self, found: Gathered, entry: Entry, gradient: torch.Tensor) -> bool:
        """Adds a gradient; returns whether its outline among replicas is new."""
        spec = getattr(gradient, "_spec", None)
        local = gradient if spec is None else compat.local_tensor(gradient)
        if entry.share is None or spec is not entry.spec:
            self._decide(entry, spec)
        share = entry.share
        assert share is not None
        changed = False
        owned = None
        if share.count != 1 or share.partial:
            if share.count > 1:
                changed = self._outline(entry, share, local)
                found.replicas.append(len(found.tensors))
            owned = (0, 0) if share.partial else share.slice(local.numel())
        if share.partial:
            found.pending.append(pending_gradient(entry, gradient, local, share))
        found.entries.append(entry)
        found.tensors.append(local)
        found.owned.append(owned)
        return changed

    def _decide(self, entry: Entry, spec: Any) -> None:
        """The share of a gradient whose layout was not seen before, or is a new object."""
        known = entry.spec
        both = spec is not None and known is not None and entry.share is not None
        if both and spec.mesh is known.mesh and spec.placements == known.placements:
            entry.spec = spec
            return
        if spec is None:
            option = entry.option if entry.option is not None else self.rules.plain
            share = self.around.of_plain(option, self.layouts, entry.label)
        else:
            share = self.around.of_dtensor(spec.mesh, spec.placements, entry.option, entry.label)
        entry.spec, entry.share, entry.replica = spec, share, None

    def _outline(self, entry: Entry, share: Ownership, local: torch.Tensor) -> bool:
        known = entry.replica
        if known is not None and local.shape == known.shape and local.dtype is known.dtype:
            return False
        by_caller = entry.option is not None and entry.option != "replicated"
        identity = None if by_caller else entry.identity
        shape = tuple(local.shape)
        entry.replica = Replica(entry.label, identity, share.index, share.count, local.dtype, shape)
        entry.outline = entry.replica.share()
        if local.numel():
            self.fresh[entry] = 0
        return True

    def list_tags(self) -> tuple[int, int]:
        """Tags of the list of parameters, whatever its order where all have names."""
        return wide_tag(sorted(self.keys()))

    def keys(self) -> list[tuple[str, tuple[int, ...]]]:
        """What makes parameters of several ranks the same: identity, and who holds them."""
        ranks = self.transport.ranks or (self.transport.rank,)
        stage = self.around.stage_of(self.layouts) if self.layouts else ()
        plain = self.rules.plain
        replicated = plain == "replicated" or (plain is None and bool(self.layouts))
        held = stage or tuple(ranks) if replicated else ()
        return [(entry.identity, entry.holders or held) for entry in self.entries]

    def plain_defaults(self, found: Gathered) -> tuple[bool, bool]:
        """Whether plain gradients were taken as replicas, and as shards, by default."""
        by_default = self.rules.plain is None and any(
            entry.spec is None and entry.option is None for entry in found.entries
        )
        return by_default and bool(self.layouts), by_default and not self.layouts


def layouts_of(tensors: Iterable[torch.Tensor]) -> list[MeshLayout]:
    """One layout for each different mesh among the DTensors of a list."""
    meshes = {}
    for tensor in tensors:
        spec = getattr(tensor, "_spec", None)
        if spec is not None:
            meshes[id(spec.mesh)] = spec.mesh
    return list(dict.fromkeys(mesh_layout(mesh) for mesh in meshes.values()))
