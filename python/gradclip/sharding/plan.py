"""The plan of a list of parameters: whose gradients this rank counts, and which part of each.

Made once from the parameters and refreshed at each call from the gradients that there are: a
missing gradient, a new tensor of the same layout or a newly frozen layer change no decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradclip.sharding import absent, compat
from gradclip.sharding.absent import ABSENT
from gradclip.sharding.copies import MeshLayout
from gradclip.sharding.ownership import Ownership, Surroundings, mesh_layout
from gradclip.sharding.partial import Pending, Reduction
from gradclip.sharding.transport import Transport
from gradclip.sharding.verification import Balance, Copy, balance

#: What `replicas=` may be: who holds copies of a parameter, by name, by parameter, or by a rule.
Replicas = Mapping[Any, Any] | Callable[[str | None, torch.Tensor], Any]


@dataclass
class Rules:
    """The caller's word on what ranks hold, beside the placements."""

    plain: Any = None
    distinct_dims: tuple[Any, ...] = ("pp",)
    replicas: Replicas | None = None
    check_replicas: bool | None = None

    def said_of(self, name: str | None, parameter: torch.Tensor) -> Any:
        """What `replicas=` says of this parameter; None where it says nothing."""
        if self.replicas is None:
            return None
        if callable(self.replicas):
            return self.replicas(name, parameter)
        if name is not None and name in self.replicas:
            return self.replicas[name]
        return next((said for key, said in self.replicas.items() if key is parameter), None)


class Entry:
    """One parameter of the plan, with what was found of its gradient."""

    __slots__ = (
        "balance",
        "copy",
        "device",
        "dtype",
        "label",
        "name",
        "said",
        "shape",
        "share",
        "spec",
        "verified",
    )

    def __init__(self, name: str | None, index: int) -> None:
        self.name = name
        self.label = f"`{name}`" if name is not None else f"parameter {index}"
        self.said: Any = None
        self.spec: Any = None
        self.share: Ownership | None = None
        self.copy: Copy | None = None
        self.balance: Balance = (0, 0)
        self.shape: torch.Size | None = None
        self.dtype: torch.dtype | None = None
        self.device: torch.device | None = None
        self.verified = False


@dataclass
class Gathered:
    """The gradients of one call: local tensors, and the range of each that counts here."""

    entries: list[Entry] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    owned: list[tuple[int, int] | None] = field(default_factory=list)
    partial: list[Entry] = field(default_factory=list)
    partial_values: list[torch.Tensor] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    cause: Exception | None = None

    def outlines(self) -> Balance:
        """The balance of the copies' dtypes and shapes: who has which gradient at all."""
        return balance(self.entries[k].balance for k in self.copies)

    def unverified(self) -> list[int]:
        """Copies whose content was not yet compared."""
        return [k for k in self.copies if not self.entries[k].verified]

    def mark_verified(self) -> None:
        """Remember that the content of all copies was compared."""
        for k in self.copies:
            self.entries[k].verified = True


class Plan:
    """The parameters of one clip over ranks; keeps no parameter alive.

    Args:
        named: (name or None, parameter) pairs, each parameter once.
        transport: how vectors are reduced.
        rules: the caller's declarations.
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
        self.around = Surroundings(transport.rank, ranks, rules.distinct_dims)
        self.entries = [Entry(name, index) for index, (name, _) in enumerate(named)]
        self.layouts = layouts_of(parameter for _, parameter in named)

    def gather(self, parameters: Sequence[torch.Tensor]) -> Gathered:
        """The gradients as they are now; an error is kept as `cause`, for all ranks to hear.

        `parameters` are those of the plan, in its order.
        """
        found = Gathered()
        for entry, parameter in zip(self.entries, parameters, strict=True):
            gradient: Any = parameter
            try:
                if self.attribute is not None:
                    gradient = getattr(parameter, self.attribute, ABSENT)
                if gradient is ABSENT:
                    gradient = None
                    self._refuse_absent(parameters)
                if gradient is not None:
                    self._add(found, entry, parameter, gradient)
            except Exception as cause:
                found.cause = found.cause or cause
            if entry.share is not None and entry.share.partial:
                found.partial.append(entry)
                found.partial_values.append(_summand(entry, parameter, gradient))
        return found

    def _refuse_absent(self, parameters: Sequence[torch.Tensor]) -> None:
        assert self.attribute is not None
        names = [entry.name for entry in self.entries if entry.name is not None]
        absent.refuse(parameters, self.attribute, names or None)

    def _add(
        self, found: Gathered, entry: Entry, parameter: torch.Tensor, gradient: torch.Tensor
    ) -> None:
        spec = getattr(gradient, "_spec", None)
        local = gradient if spec is None else compat.local_tensor(gradient)
        if entry.share is None or spec is not entry.spec:
            self._decide(entry, parameter, spec)
        share = entry.share
        assert share is not None
        owned = None
        if share.count != 1 or share.partial:
            if share.count > 1:
                found.copies.append(len(found.tensors))
            self._outline(entry, share, local)
            owned = _counted_in_place(share, local)
        found.entries.append(entry)
        found.tensors.append(local)
        found.owned.append(owned)

    def _decide(self, entry: Entry, parameter: torch.Tensor, spec: Any) -> None:
        """The share of a gradient whose layout was not seen before, or is a new object."""
        known = entry.spec
        both = spec is not None and known is not None and entry.share is not None
        if both and spec.mesh is known.mesh and spec.placements == known.placements:
            entry.spec = spec
            return
        entry.said = self.rules.said_of(entry.name, parameter)
        if spec is None:
            said = entry.said if entry.said is not None else self.rules.plain
            share = self.around.of_plain(said, self.layouts, entry.label)
        else:
            share = self.around.of_dtensor(spec.mesh, spec.placements, entry.said, entry.label)
        entry.spec, entry.share, entry.copy, entry.verified = spec, share, None, False

    def _outline(self, entry: Entry, share: Ownership, local: torch.Tensor) -> None:
        if entry.copy is not None and local.shape == entry.shape and local.dtype is entry.dtype:
            return
        entry.shape, entry.dtype, entry.device = local.shape, local.dtype, local.device
        entry.verified = False
        outline = (str(local.dtype), tuple(local.shape))
        entry.copy = Copy(entry.label, share.index, share.count, outline)
        entry.balance = entry.copy.weighed()

    def takes_plain_as(self, found: Gathered) -> tuple[bool, bool]:
        """Whether plain gradients were taken as copies, and as shards, without a word about it."""
        untold = self.rules.plain is None and any(
            entry.spec is None and entry.said is None for entry in found.entries
        )
        return untold and bool(self.layouts), untold and not self.layouts

    def pending(self, found: Gathered) -> list[Pending]:
        """The partial gradients with the reductions that they need; a missing one brings zeros."""
        items = []
        for entry, local in zip(found.partial, found.partial_values, strict=True):
            share, mesh = entry.share, entry.spec.mesh
            assert share is not None
            reductions = tuple(
                Reduction(dim, mesh.get_group(dim), how)
                for dim, how in share.partial
                if mesh.size(dim) > 1
            )
            items.append(Pending(local.detach().reshape(-1), reductions))
        return items


def _summand(entry: Entry, parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """What this rank brings to a pending sum.

    A missing gradient, or one whose dtype every rank will refuse, brings zeros of the kind that
    the other ranks bring: the reduction must not hang.
    """
    if gradient is not None and (gradient.is_floating_point() or gradient.is_complex()):
        return compat.local_tensor(gradient)
    if compat.is_dtensor(parameter):
        return torch.zeros_like(compat.local_tensor(parameter))
    return torch.zeros(entry.shape or (0,), dtype=entry.dtype, device=entry.device)


def _counted_in_place(share: Ownership, local: torch.Tensor) -> tuple[int, int]:
    """What counts of the local tensor itself: of a partial one nothing, its reduced piece does."""
    return (0, 0) if share.partial else share.slice(local.numel())


def layouts_of(tensors: Iterable[torch.Tensor]) -> list[MeshLayout]:
    """One layout for each different mesh among the DTensors of a list."""
    meshes = {}
    for tensor in tensors:
        spec = getattr(tensor, "_spec", None)
        if spec is not None:
            meshes[id(spec.mesh)] = spec.mesh
    return list(dict.fromkeys(mesh_layout(mesh) for mesh in meshes.values()))
