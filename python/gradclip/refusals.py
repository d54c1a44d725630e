"""Gradients that torch operations are to handle, looked at before anything is written.

The core has checked the memory of all tensors that it plans; these are the others.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

_FLOAT8 = {
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
    if hasattr(torch, name)
}
_SUPPORTED = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    *_FLOAT8,
}

Name = Callable[[int], str]


def check(
    tensors: Sequence[Tensor], reference: Sequence[int], unplanned: set[int], name: Name
) -> None:
    """Refuses what has no norm, cannot be written, or shares memory.

    Args:
        tensors: all gradients of a call.
        reference: places of those for torch operations.
        unplanned: places of those whose memory the core did not check.
        name: how errors call the gradient at a place.

    Raises:
        TypeError: a dtype, layout or kind of tensor that is not supported.
        ValueError: memory that overlaps, or that may not be written.
    """
    for place in reference:
        _check_kind(tensors[place], name(place))
    _check_values(tensors, reference, name)
    for place in unplanned:
        _check_own_memory(tensors[place], name(place))
    if unplanned:
        _check_overlaps(tensors, unplanned, name)


def _check_kind(tensor: Tensor, name: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"gradient of {name} is a {type(tensor).__name__}; expected a tensor or None"
        )
    if tensor.is_quantized or tensor.dtype not in _SUPPORTED:
        raise TypeError(
            f"gradient of {name} is {tensor.dtype}; expected a floating or complex dtype (float16, "
            "bfloat16, float32, float64, complex64, complex128, a float8 with a fraction), so "
            f"convert it, for instance by `{_other_dtype(tensor)}`"
        )
    if tensor.is_nested or tensor.layout not in (torch.strided, torch.sparse_coo):
        layout = "nested" if tensor.is_nested else tensor.layout
        raise TypeError(
            f"gradient of {name} has layout {layout}; expected strided or sparse COO, so convert "
            f"it, for instance by `{_other_layout(tensor)}`"
        )
    if hasattr(tensor, "device_mesh"):
        raise TypeError(
            f"gradient of {name} is a DTensor but its parameter is none; pass group=, the ranks to "
            "clip over, such as torch.distributed.group.WORLD"
        )
    if tensor.layout == torch.sparse_coo and tensor.dtype in _FLOAT8 and not tensor.is_coalesced():
        raise TypeError(
            f"gradient of {name} is sparse {tensor.dtype} with repeated indices, which torch "
            "cannot add up; convert it, for instance by `.float()`"
        )
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"gradient of {name} is an inference tensor, which may not be written here; pass a "
            "clone, or clip inside of torch.inference_mode()"
        )


def _other_dtype(tensor: Tensor) -> str:
    if tensor.is_quantized:
        return ".dequantize()"
    return ".to(torch.complex64)" if tensor.is_complex() else ".float()"


def _other_layout(tensor: Tensor) -> str:
    if tensor.is_nested:
        return ".to_padded_tensor(0.0)"
    return ".to_dense()" if tensor.is_mkldnn else ".to_sparse_coo()"


def _check_values(tensors: Sequence[Tensor], reference: Sequence[int], name: Name) -> None:
    """Refuses tensors without values among others: they would count as zeros."""
    for kind, is_one in (("fake", is_fake), ("meta", _is_meta)):
        places = [place for place in reference if is_one(tensors[place])]
        if places and len(places) < len(tensors):
            raise TypeError(
                f"gradient of {name(places[0])} is a {kind} tensor among others; pass either kind "
                "alone"
            )


def _is_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta" and not is_fake(tensor)


def _check_own_memory(tensor: Tensor, name: str) -> None:
    """Refuses elements that share memory, other than by an expanded dimension."""
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return
    reach = 0
    dims = sorted(
        (abs(stride), size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    for stride, size in dims:
        if size > 1 and stride > 0:
            if stride <= reach:
                raise ValueError(
                    f"gradient of {name} overlaps itself (strides {tensor.stride()}); give it "
                    "memory of its own, for instance by `.clone()`"
                )
            reach += stride * (size - 1)


def _check_overlaps(tensors: Sequence[Tensor], unplanned: set[int], name: Name) -> None:
    """Refuses an unplanned tensor whose bytes lie between those of another one."""
    spans = sorted(
        (*span, place)
        for place, tensor in enumerate(tensors)
        if (span := _span(tensor)) is not None
    )
    device, end, last = "", 0, -1
    for on, start, stop, place in spans:
        if on == device and start < end and unplanned & {last, place}:
            raise ValueError(
                f"gradients of {name(last)} and {name(place)} share memory; give one of them "
                "memory of its own, for instance by `.clone()`"
            )
        if on != device or stop > end:
            device, end, last = on, stop, place


def _span(tensor: Tensor) -> tuple[str, int, int] | None:
    """Device and bytes from the first to the last element; None for a tensor without memory."""
    stored = tensor._values() if tensor.layout == torch.sparse_coo else tensor
    if stored.numel() == 0 or stored.device.type == "meta" or is_fake(stored):
        return None
    sizes = zip(stored.shape, stored.stride(), strict=True)
    reach = 1 + sum((size - 1) * abs(stride) for size, stride in sizes)
    start = stored.data_ptr()
    return str(stored.device), start, start + reach * stored.element_size()
