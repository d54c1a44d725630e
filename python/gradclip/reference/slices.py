"""Bounded slices of tensors with any strides, without a copy."""

import math
from collections.abc import Iterator

import torch

SLICE_ELEMENTS = 1 << 18
"""Elements of a slice: 2 MiB for each 64-bit temporary, and fewer than 32 live at once."""


def slices(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of at most `SLICE_ELEMENTS` elements that cover the tensor once."""
    if tensor.numel() <= SLICE_ELEMENTS:
        if tensor.numel():
            yield tensor
        return
    rows = SLICE_ELEMENTS * tensor.shape[0] // tensor.numel()
    if rows:
        for start in range(0, tensor.shape[0], rows):
            yield tensor[start : start + rows]
        return
    for row in tensor:
        yield from slices(row)


def flat_range(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Views that cover the row-major elements [start, stop) once, whatever the strides."""
    if start >= stop:
        return
    if stop - start == tensor.numel():
        yield tensor
        return
    row = tensor.numel() // tensor.shape[0]
    first, last = start // row, (stop - 1) // row
    if first == last:
        inner = tensor[first : first + 1] if row == 1 else tensor[first]
        yield from flat_range(inner, start - first * row, stop - first * row)
        return
    head = first + (start > first * row)
    tail = last + (stop == (last + 1) * row)
    if head > first:
        yield from flat_range(tensor[first], start - first * row, row)
    yield tensor[head:tail]
    if tail == last:
        yield from flat_range(tensor[last], 0, stop - last * row)


def unexpanded(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The tensor with each stride-0 dimension read once, and how often it repeats."""
    expanded = [
        dim
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        if size > 1 and stride == 0
    ]
    weight = math.prod(tensor.shape[dim] for dim in expanded)
    for dim in expanded:
        tensor = tensor.narrow(dim, 0, 1)
    return tensor, weight
