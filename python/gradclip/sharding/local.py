"""This rank's gradients of one call: read and checked, then summed and scaled by the engines."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradclip import engine, gradients
from gradclip._core import PowerScale, Sums
from gradclip.gradients import Gradients
from gradclip.parameters import Parameters
from gradclip.sharding.plan import Entry, Gathered


class Local:
    """The local tensors of one call, and the pieces of partial gradients that were reduced.

    Raises:
        TypeError: for dtypes without a norm.
        ValueError: for memory that overlaps; both name the gradient.
    """

    def __init__(self, gathered: Gathered, pieces: Sequence[torch.Tensor]) -> None:
        self.entries = gathered.entries
        self.partial = gathered.partial
        self.gradients = read(gathered.entries, gathered.tensors, gathered.owned)
        owned = [
            None if entry.share is None else entry.share.slice(piece.numel())
            for entry, piece in zip(gathered.partial, pieces, strict=True)
        ]
        self.pieces = read(gathered.partial, pieces, owned)

    @property
    def double(self) -> bool:
        """Whether a gradient is float64 or complex128."""
        return self.gradients.total_dtype == torch.float64

    def sums(self, norm_type: float, scale: PowerScale | None = None) -> Sums:
        """The sums of everything that this rank counts."""
        sums = engine.sums(self.gradients, norm_type, scale)
        if self.partial:
            sums = sums.merged(engine.sums(self.pieces, norm_type, scale))
        return sums

    def each(self, norm_type: float) -> dict[int, Sums]:
        """The sums of each parameter of the plan that counts here, by the id of its entry."""
        found = _by_entry(self.entries, self.gradients, norm_type)
        return found | _by_entry(self.partial, self.pieces, norm_type)

    def only(self, entry: int, norm_type: float, scale: PowerScale) -> Sums | None:
        """The sums of one parameter, by the id of its entry; None when it has no gradient here."""
        for entries, read_ in ((self.partial, self.pieces), (self.entries, self.gradients)):
            for place, position in enumerate(read_.core.positions):
                if id(entries[position]) == entry:
                    return engine.sums(read_.only(place), norm_type, scale)
        return None


def read(
    entries: Sequence[Entry],
    tensors: Sequence[torch.Tensor],
    owned: Sequence[tuple[int, int] | None],
) -> Gradients:
    """Tensors of these entries, read and checked, with the range that counts of each."""
    names = [entry.name or entry.label for entry in entries]
    return gradients.given(Parameters.of(list(tensors), names), list(owned))


def _by_entry(entries: Sequence[Entry], found: Gradients, norm_type: float) -> dict[int, Sums]:
    each = engine.sums_each(found, norm_type)
    return {
        id(entries[position]): sums
        for position, sums in zip(found.core.positions, each, strict=True)
    }
