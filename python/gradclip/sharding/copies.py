"""Which ranks of a group hold the same piece of a tensor, from how its mesh lies in its root.

A rank's place in the root mesh is one number, its row-major position. A mesh sliced, flattened or
unflattened from the root covers some *digits* of that number in a mixed-radix system: a digit
(stride, size) of position x is x // stride % size. Digits that the mesh lacks lead to other ranks,
which hold copies of the tensor, except along distinct digits (pipeline stages), which lead to
other tensors. Positions need no names of dimensions: a flattened mesh has none of its root's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

Digit = tuple[int, int]


@dataclass(frozen=True)
class MeshLayout:
    """Global ranks of a root mesh and of one mesh inside it, both row-major, as plain data."""

    root: tuple[int, ...]
    root_shape: tuple[int, ...]
    root_names: tuple[str, ...]
    ranks: tuple[int, ...]
    shape: tuple[int, ...]

    def alone(self) -> MeshLayout:
        """The same mesh as a root of its own."""
        return MeshLayout(self.ranks, self.shape, (), self.ranks, self.shape)

    def named_digit(self, name: str) -> tuple[Digit, ...]:
        """The digit of the root's dimension `name`; none when the root has no such dimension."""
        if name not in self.root_names:
            return ()
        place = self.root_names.index(name)
        size = self.root_shape[place]
        return ((prod(self.root_shape[place + 1 :]), size),) if size > 1 else ()

    def digits(self, ranks: Sequence[int]) -> tuple[Digit, ...]:
        """The digits along which `ranks` vary in the root; none when they are not all in it."""
        if not set(ranks) <= set(self.root):
            return ()
        return digits_of([self.root.index(rank) for rank in ranks], len(self.root))


def digits_of(positions: Sequence[int], total: int) -> tuple[Digit, ...]:
    """The digits along which `positions` vary inside a root of `total` ranks.

    Raises:
        ValueError: when the positions are no mixed-radix pattern.
    """
    ordered = sorted(positions)
    offsets = [position - ordered[0] for position in ordered]
    digits: list[Digit] = []
    covered = 1
    while covered < len(offsets):
        stride = offsets[covered]
        size = 1
        while size * covered < len(offsets) and offsets[size * covered] == size * stride:
            size += 1
        digits.append((stride, size))
        covered *= size
    if not _is_mixed_radix(digits, total) or _span(digits) != offsets:
        raise ValueError(f"positions {ordered} are no regular part of a mesh of {total} ranks")
    return tuple(digits)


def _is_mixed_radix(digits: Sequence[Digit], total: int) -> bool:
    below = 1
    for stride, size in digits:
        if stride % below:
            return False
        below = stride * size
    return total % below == 0


def _span(digits: Sequence[Digit]) -> list[int]:
    offsets = [0]
    for stride, size in digits:
        offsets = [offset + stride * k for k in range(size) for offset in offsets]
    return sorted(offsets)


def digit_values(position: int, digits: Sequence[Digit]) -> tuple[int, ...]:
    """The values of `digits` in `position`."""
    return tuple(position // stride % size for stride, size in digits)


def without_digits(position: int, digits: Sequence[Digit]) -> int:
    """`position` with every one of `digits` set to zero."""
    return position - sum(position // stride % size * stride for stride, size in digits)


def block_of(
    root: tuple[int, ...], distinct: Sequence[Digit], rank: int, covered: Sequence[Digit] = ()
) -> tuple[int, ...]:
    """The ranks of `root` that belong to the same tensors as `rank`: its stage, so to say."""
    own = digit_values(without_digits(root.index(rank), covered), distinct)
    return tuple(
        member
        for position, member in enumerate(root)
        if digit_values(without_digits(position, covered), distinct) == own
    )


@dataclass(frozen=True)
class Holders:
    """Who holds which piece of one tensor: the piece of each rank of the block."""

    pieces: dict[int, tuple[int, ...]]

    def of_piece(self, rank: int, group: Sequence[int]) -> tuple[int, ...]:
        """The ranks of `group` that hold the same piece as `rank`, in the root's order."""
        members = frozenset(group)
        own = self.pieces.get(rank)
        if own is None:
            return ()
        return tuple(r for r, piece in self.pieces.items() if piece == own and r in members)

    def missing_from(self, group: Sequence[int]) -> tuple[int, ...]:
        """Ranks whose piece no rank of `group` holds."""
        held = {self.pieces[rank] for rank in group if rank in self.pieces}
        return tuple(rank for rank, piece in self.pieces.items() if piece not in held)


def holders(
    layout: MeshLayout, unique_dims: Sequence[int], distinct: Sequence[Digit], rank: int
) -> Holders:
    """The piece that each rank of `rank`'s block holds of a tensor on `layout`'s mesh.

    `unique_dims` are the mesh dimensions along which pieces differ. A rank outside the root
    holds nothing, and neither does anybody as far as it can tell.
    """
    if rank not in layout.root:
        return Holders({})
    place = {member: position for position, member in enumerate(layout.root)}
    covered = digits_of([place[member] for member in layout.ranks], len(layout.root))
    base = without_digits(place[rank], covered)
    coordinates = _coordinates(layout)
    pieces: dict[int, tuple[int, ...]] = {}
    for member in block_of(layout.root, distinct, rank, covered):
        position = place[member]
        twin = layout.root[base + position - without_digits(position, covered)]
        pieces[member] = tuple(coordinates[twin][dim] for dim in unique_dims)
    return Holders(pieces)


def _coordinates(layout: MeshLayout) -> dict[int, tuple[int, ...]]:
    found = {}
    for flat, rank in enumerate(layout.ranks):
        coordinate = []
        for size in reversed(layout.shape):
            flat, digit = divmod(flat, size)
            coordinate.append(digit)
        found[rank] = tuple(reversed(coordinate))
    return found
