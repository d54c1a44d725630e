"""The values that a sparse COO tensor lists, each with its logical index, and none twice.

Repeats of an index are added in an order that their listing cannot change: sorted by their bits, in
float64, neighbours first. So the same values at the same indices give the same sums, listed in any
order, on any device.
"""

from collections.abc import Iterator

import torch

from .slices import SLICE_ELEMENTS, slices

_DOUBLES = {True: torch.complex128, False: torch.float64}


def listed_values(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Listed values in slices, and the row-major indices of their elements: int64[n].

    Waits for the device unless the tensor is coalesced. Temporaries grow with the listed indices,
    and for repeated ones with the values of `SLICE_ELEMENTS` elements.
    """
    values = tensor._values()
    rows = _rows(tensor)
    columns = values[0].numel() if len(values) else 1
    if tensor.is_coalesced() or rows.unique().numel() == rows.numel():
        start = 0
        for piece in slices(values):
            listing = torch.arange(start, start + piece.numel(), device=values.device)
            row, column = listing // columns, listing % columns
            yield piece, rows[row] * columns + column
            start += piece.numel()
        return
    flat = values.reshape(len(values), columns)
    width = max(1, SLICE_ELEMENTS // len(values))
    for start in range(0, columns, width):
        distinct, sums = _summed(rows, flat[:, start : start + width])
        column = torch.arange(start, start + sums.shape[1], device=values.device)
        yield sums, (distinct.unsqueeze(1) * columns + column).reshape(-1)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The row-major index of each listed entry among the sparse dimensions."""
    indices = tensor._indices()
    rows = torch.zeros(indices.shape[1], dtype=torch.int64, device=indices.device)
    for size, index in zip(tensor.shape, indices, strict=False):
        rows = rows * size + index
    return rows


def _summed(rows: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct rows, and in each column the sum of the values listed for them."""
    wide = values.to(_DOUBLES[values.is_complex()])
    numbers = torch.view_as_real(wide).flatten(1) if wide.is_complex() else wide
    rows, numbers = _sorted(rows, numbers)
    group, counts = torch.unique_consecutive(rows, return_inverse=True, return_counts=True)[1:]
    distinct = rows[counts.cumsum(0) - counts]
    rank = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[group]
    while len(numbers) > len(distinct):
        first = (rank % 2 == 0).nonzero().squeeze(1)
        paired = (first + 1 < len(rank)) & (rank[(first + 1).clamp(max=len(rank) - 1)] % 2 == 1)
        numbers[first[paired]] += numbers[first[paired] + 1]
        numbers, rank = numbers[first], rank[first] // 2
    if wide.is_complex():
        numbers = torch.view_as_complex(numbers.unflatten(1, (-1, 2)))
    return distinct, numbers.to(values.dtype)


def _sorted(rows: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted rows, and the numbers of each column sorted by row and then by bits."""
    by_bits = numbers.view(torch.int64).argsort(dim=0, stable=True)
    by_row = rows[by_bits].argsort(dim=0, stable=True)
    return rows.sort().values, numbers.gather(0, by_bits).gather(0, by_row)
