"""This rank's gradients of one call: read and checked, then summed and scaled by the engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from gradclip import engine, gradients
from gradclip._core import PowerScale, Sums
from gradclip.gradients import Gradients
from gradclip.parameters import Parameters
from gradclip.sharding.plan import Entry


class Local:
    """Local tensors of one call, of one parameter each, with the range that counts of each.

    Raises:
        TypeError: for dtypes without a norm.
        ValueError: for memory that overlaps; both name the gradient.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        tensors: Sequence[torch.Tensor],
        owned: Sequence[tuple[int, int] | None],
    ) -> None:
        self.entries = entries
        self.gradients = read(entries, tensors, owned)

    @property
    def double(self) -> bool:
        """Whether a gradient is float64 or complex128."""
        return self.gradients.total_dtype == torch.float64

    def sums(self, norm_type: float, scale: PowerScale | None = None) -> Sums:
        """The sums of everything that this rank counts."""
        return engine.sums(self.gradients, norm_type, scale)

    def each(self, norm_type: float) -> dict[Entry, Sums]:
        """The sums of each parameter that counts here."""
        found = engine.sums_each(self.gradients, norm_type)
        positions = self.gradients.core.positions
        return {
            self.entries[position]: sums for position, sums in zip(positions, found, strict=True)
        }

    def only(self, entry: Entry, norm_type: float, scale: PowerScale) -> Sums | None:
        """The sums of one parameter; None when it has no gradient here."""
        for index, position in enumerate(self.gradients.core.positions):
            if self.entries[position] is entry:
                return engine.sums(self.gradients.only(index), norm_type, scale)
        return None


class Pieces(NamedTuple):
    """The reduced pieces of pending gradients that this rank holds, and what it counts of each."""

    entries: Sequence[Entry]
    values: Sequence[torch.Tensor]
    owned: Sequence[tuple[int, int]]

    def read(self) -> Local:
        """The pieces, read and checked."""
        return Local(self.entries, self.values, self.owned)


def read(
    entries: Sequence[Entry],
    tensors: Sequence[torch.Tensor],
    owned: Sequence[tuple[int, int] | None],
) -> Gradients:
    """Tensors of these entries, read and checked, with the range that counts of each."""
    names = [entry.name or entry.label for entry in entries]
    return gradients.given(Parameters.of(list(tensors), names), list(owned))
