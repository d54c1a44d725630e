"""Gradients whose sum over a mesh dimension is still pending: reduced into owned pieces.

A norm of a sum needs the sum, so this is the only traffic that grows with the gradients. One
reduce-scatter for each (mesh dimension, dtype) takes all of them together; each rank keeps the
piece that it counts, and the gradients themselves stay as they are (scaling commutes with sums).

Which gradients are pending is agreed first: by balances in the first exchange where every rank of a
mesh knows, else by `resolve`, since a rank without a gradient cannot tell and brings zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from gradclip.sharding import collectives, compat
from gradclip.sharding.agreement import Balance, balanced_share, digest
from gradclip.sharding.transport import max_over

if TYPE_CHECKING:
    from gradclip.sharding.ownership import Ownership, Surroundings
    from gradclip.sharding.plan import Entry

_REDUCIBLE = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
_ABSENT = -(2**62)


class Reduction(NamedTuple):
    """A pending reduction: the mesh dimension, its group, and "sum" or "avg"."""

    dim: int
    group: dist.ProcessGroup
    operation: str


@dataclass(frozen=True)
class PendingGradient:
    """One local tensor, flat, with the reductions that it still needs.

    `identity` names its parameter alike on all ranks. `signature` stands for what all ranks of its
    mesh must have alike: identity, global shape, dtype, kind of device and placements.
    """

    label: str
    identity: str
    values: torch.Tensor
    reductions: tuple[Reduction, ...]
    signature: int
    mesh: Any
    ownership: Ownership

    def balance(self) -> Balance:
        """This rank's share of the balance of pending sums over the ranks of the mesh."""
        ranks = compat.mesh_ranks(self.mesh)
        index = ranks.index(dist.get_rank())
        return balanced_share(index, len(ranks), "pending", self.signature)


def pending_gradient(
    entry: Entry, gradient: Any, local: torch.Tensor, ownership: Ownership
) -> PendingGradient:
    """A DTensor gradient whose sum is pending over the mesh dimensions in `ownership.partial`.

    Raises:
        TypeError: a dtype or layout that no collective reduces.
    """
    if local.layout != torch.strided or local.dtype not in _REDUCIBLE:
        what = local.dtype if local.layout == torch.strided else f"a {local.layout} tensor"
        raise TypeError(
            f"gradient of {entry.label} is {what} with a pending sum over ranks; expected a dense"
            " tensor of a floating or complex dtype, so redistribute the gradient first"
        )
    spec = gradient._spec
    shape = tuple(gradient.shape)
    return _pending(entry, spec.mesh, spec.placements, shape, local, ownership)


def _pending(
    entry: Entry,
    mesh: Any,
    placements: Sequence[Any],
    shape: tuple[int, ...],
    local: torch.Tensor,
    ownership: Ownership,
) -> PendingGradient:
    reductions = tuple(
        Reduction(dim, mesh.get_group(dim), operation)
        for dim, operation in ownership.partial
        if mesh.size(dim) > 1
    )
    signature = _signature(entry, shape, local.dtype, local.device, placements)
    values = local.detach().reshape(-1)
    return PendingGradient(
        entry.label, entry.identity, values, reductions, signature, mesh, ownership
    )


def _signature(
    entry: Entry,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    placements: Sequence[Any],
) -> int:
    described = entry.identity, shape, str(dtype), device.type, *map(str, placements)
    return 1 + digest(described) % 2**60


def resolve(
    entries: Sequence[Entry],
    parameters: Sequence[torch.Tensor],
    pending: Sequence[PendingGradient],
    missing: Sequence[Entry],
    around: Surroundings,
) -> list[PendingGradient]:
    """The pending gradients of this rank, with zeros for those that only other ranks have.

    Every rank that lists DTensors takes part, with one MAX all-reduce over each dimension of each
    mesh; the first exchange has found that all ranks of a mesh list the same parameters.

    Raises:
        ValueError: ranks differ in what is pending; every rank of that mesh finds the same.
    """
    mine = {item.identity: item for item in pending}
    absent = {entry.identity for entry in missing}
    on_mesh: dict[Any, list[tuple[Entry, torch.Tensor]]] = {}
    for entry, parameter in zip(entries, parameters, strict=True):
        spec: Any = getattr(parameter, "_spec", None)
        if spec is not None:
            key = compat.mesh_ranks(spec.mesh), tuple(spec.mesh.mesh.shape)
            on_mesh.setdefault(key, []).append((entry, parameter))
    resolved: list[PendingGradient] = []
    refused: ValueError | None = None
    for key in sorted(on_mesh):
        members = sorted(on_mesh[key], key=lambda member: member[0].identity)
        mesh = members[0][1]._spec.mesh  # type: ignore[attr-defined]
        states = [_state(entry.identity, mine, absent) for entry, _ in members]
        for (entry, parameter), state in zip(members, _reduced(states, mesh), strict=True):
            most, least, has_other = state[0], -state[1], state[2]
            if most == _ABSENT:
                continue
            item = mine.get(entry.identity) or _zeros(entry, parameter, most, around)
            if most != least or has_other or item is None:
                refused = refused or ValueError(
                    f"the gradient of {entry.label} has a pending sum on some ranks of its mesh,"
                    " and none, or one of another dtype, shape or placement, on others;"
                    " redistribute it alike on all ranks"
                )
            else:
                resolved.append(item)
    if len(resolved) < len(mine) and refused is None:
        refused = ValueError(
            "a gradient has a pending sum over ranks and its parameter is no DTensor; redistribute"
            " the gradient first"
        )
    if refused is not None:
        raise refused
    order = {entry.identity: k for k, entry in enumerate(entries)}
    return sorted(resolved, key=lambda item: order[item.identity])


def _state(
    identity: str, mine: dict[str, PendingGradient], absent: set[str]
) -> tuple[int, int, int]:
    if identity in mine:
        return mine[identity].signature, -mine[identity].signature, 0
    return _ABSENT, _ABSENT, int(identity not in absent)


def _reduced(states: Sequence[tuple[int, int, int]], mesh: Any) -> list[tuple[int, int, int]]:
    """The maximum of the states over all ranks of a mesh."""
    vector = torch.tensor(states, dtype=torch.int64, device="cpu")
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            vector = max_over(vector, mesh.get_group(dim))
    return [(int(a), int(b), int(c)) for a, b, c in vector.tolist()]


def _zeros(
    entry: Entry, parameter: torch.Tensor, signature: int, around: Surroundings
) -> PendingGradient | None:
    """What a rank without the gradient brings: zeros of the kind that the others have.

    The others' placements are the parameter's, with a pending sum where that is a replica; None if
    no such kind has their signature.
    """
    spec: Any = getattr(parameter, "_spec", None)
    shape = tuple(parameter.shape)
    local = compat.local_tensor(parameter)
    dtypes = (parameter.dtype, *(dtype for dtype in _REDUCIBLE if dtype != parameter.dtype))
    for placements in _pending_placements(spec):
        for dtype in dtypes:
            if _signature(entry, shape, dtype, local.device, placements) == signature:
                zeros = torch.zeros(local.shape, dtype=dtype, device=local.device)
                owned = around.of_dtensor(spec.mesh, placements, entry.option, entry.label)
                return _pending(entry, spec.mesh, placements, shape, zeros, owned)
    return None


def _pending_placements(spec: Any) -> Iterator[list[Any]]:
    from torch.distributed.tensor import Partial

    replicas = [dim for dim, placement in enumerate(spec.placements) if placement.is_replicate()]
    for operations in itertools.product(("sum", "avg", None), repeat=len(replicas)):
        placements = list(spec.placements)
        for dim, operation in zip(replicas, operations, strict=True):
            if operation is not None:
                placements[dim] = Partial(operation)
        yield placements


def reduced_pieces(pending: Sequence[PendingGradient]) -> list[torch.Tensor]:
    """This rank's piece of each sum, in order; mesh dimensions are reduced first to last.

    Every rank of a mesh dimension must bring the same shapes and dtypes under the same identities.
    """
    values = [item.values for item in pending]
    for dim in sorted({reduction.dim for item in pending for reduction in item.reductions}):
        for members in _buckets(pending, values, dim):
            first = next(r for r in pending[members[0]].reductions if r.dim == dim)
            pieces = _reduce_scattered([values[k] for k in members], first.group)
            for k, piece in zip(members, pieces, strict=True):
                average = any(r.dim == dim and r.operation == "avg" for r in pending[k].reductions)
                values[k] = piece.div_(first.group.size()) if average else piece
    return values


def _buckets(
    pending: Sequence[PendingGradient], values: Sequence[torch.Tensor], dim: int
) -> list[list[int]]:
    """The positions that share a group and a dtype, in an order that all ranks share."""
    found: dict[tuple[object, ...], list[int]] = {}
    for k, item in enumerate(pending):
        for reduction in item.reductions:
            if reduction.dim == dim:
                key = compat.group_ranks(reduction.group), str(values[k].dtype)
                found.setdefault((*key, values[k].device.type), []).append(k)
    return [
        sorted(found[key], key=lambda k: pending[k].identity) for key in sorted(found, key=repr)
    ]


def _reduce_scattered(
    values: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Piece `rank` of the sum over `group` of each flat tensor, with one reduce-scatter."""
    size, rank = group.size(), group.rank()
    chunks = [-(-tensor.numel() // size) for tensor in values]
    send = values[0].new_zeros(size, sum(chunks))
    offset = 0
    for tensor, chunk in zip(values, chunks, strict=True):
        for owner in range(size):
            part = tensor[owner * chunk : (owner + 1) * chunk]
            send[owner, offset : offset + part.numel()] = part
        offset += chunk
    received = send.new_zeros(sum(chunks))
    collectives.reduce_scatter(_reals(received), _reals(send), group)
    pieces, offset = [], 0
    for tensor, chunk in zip(values, chunks, strict=True):
        kept = max(0, min(chunk, tensor.numel() - rank * chunk))
        pieces.append(received[offset : offset + kept])
        offset += chunk
    return pieces


def _reals(tensor: torch.Tensor) -> torch.Tensor:
    """The flat tensor with two reals for each complex element, which collectives do not take."""
    flat = tensor.reshape(-1)
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
