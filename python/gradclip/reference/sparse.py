"""Sparse COO gradients: an index listed twice counts as its sum, an index not listed is a zero."""

from collections.abc import Iterator

import torch

from .slices import SLICE_ELEMENTS


def coalesced_blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Coalesced tensors that together hold each listed element once.

    An uncoalesced tensor is coalesced a block of dense columns at a time: temporaries grow with
    the number of listed indices, as the indices themselves do, not with the values.
    """
    if tensor.is_coalesced() or tensor.dense_dim() == 0:
        yield tensor.coalesce()
        return
    listed = tensor._nnz()
    columns = tensor._values().reshape(listed, -1)
    width = max(1, SLICE_ELEMENTS // max(1, listed))
    shape = tensor.shape[: tensor.sparse_dim()]
    for start in range(0, columns.shape[1], width):
        block = columns[:, start : start + width]
        size = (*shape, block.shape[1])
        listing = torch.sparse_coo_tensor(tensor._indices(), block, size, check_invariants=False)
        yield listing.coalesce()


def owned_values(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """The listed values among the row-major elements [start, stop); waits for the device."""
    whole = tensor.coalesce()
    values = whole.values()
    columns = values[0].numel() if len(values) else 1
    row = torch.zeros(whole._nnz(), dtype=torch.int64, device=tensor.device)
    for size, index in zip(tensor.shape, whole.indices(), strict=False):
        row = row * size + index
    place = (row * columns).unsqueeze(1) + torch.arange(columns, device=tensor.device)
    return values.reshape(-1, columns)[(place >= start) & (place < stop)]
