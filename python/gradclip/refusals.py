"""Gradients that torch operations are to handle, looked at before anything is written.

The core has checked the memory of all tensors that it plans; these are the others.
"""

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._C import _functorch
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad

from gradclip import wrappers

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
    torch.complex32,
    torch.complex64,
    torch.complex128,
    *_FLOAT8,
}
_FAKE = torch._C._TorchDispatchModeKey.FAKE

Name = Callable[[int], str]


def check_modes(tensors: Sequence[Tensor], name: Name) -> None:
    """Refuses tensors that stand for more than their elements, where any such can be.

    Raises:
        TypeError: a real gradient under FakeTensorMode, which would be changed for nothing; one
            with a forward-mode tangent, or one that torch.func follows.
    """
    if torch._C._get_dispatch_mode(_FAKE) is not None:
        _refuse_first(
            tensors,
            lambda tensor: not is_fake(tensor),
            name,
            "is a real tensor under FakeTensorMode, where nothing is computed; leave the mode, or "
            "pass fake tensors",
        )
    if forward_ad._current_level >= 0:
        _refuse_first(
            tensors,
            lambda tensor: forward_ad.unpack_dual(tensor).tangent is not None,
            name,
            "carries a forward-mode tangent, which gradclip does not follow; pass its primal, "
            "torch.autograd.forward_ad.unpack_dual(gradient).primal",
        )
    if _functorch.peek_interpreter_stack() is not None:
        _refuse_first(
            tensors,
            _functorch.is_functorch_wrapped_tensor,
            name,
            "is inside of a transform of torch.func that gradclip does not follow (vmap it does); "
            "clip what torch.func.grad returns, after it",
        )


def _refuse_first(
    tensors: Sequence[Tensor], is_one: Callable[[Tensor], bool], name: Name, words: str
) -> None:
    for place, tensor in enumerate(tensors):
        if isinstance(tensor, Tensor) and is_one(tensor):
            raise TypeError(f"gradient of {name(place)} {words}")


def refuse_module(tensors: object, done: str) -> None:
    """Raises TypeError for a Module in the place of gradients: its weights would be taken."""
    if isinstance(tensors, torch.nn.Module):
        raise TypeError(
            f"`tensors` is a {type(tensors).__name__}, whose weights would be {done}; pass "
            "gradients, such as [p.grad for p in model.parameters()], or model.parameters() if "
            "weights are meant"
        )


def check_value(number: object, name: str, gradients: Sequence[Tensor]) -> None:
    """Raises TypeError for an argument without a value where gradients have values."""
    if not isinstance(number, Tensor) or not (number.is_meta or is_fake(number)):
        return
    if not all(gradient.is_meta or is_fake(gradient) for gradient in gradients):
        kind = "meta" if number.is_meta else "fake"
        raise TypeError(
            f"`{name}` is a {kind} tensor, which holds no value; pass a number or a real tensor"
        )


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
    if _is_masked(tensor):
        raise TypeError(
            f"gradient of {name} is a MaskedTensor, whose masked elements have no value; fill them "
            "in, for instance by `.to_tensor(0.0)`"
        )
    if tensor.is_quantized or tensor.dtype not in _SUPPORTED:
        raise TypeError(
            f"gradient of {name} is {tensor.dtype}; expected a floating or complex dtype (float16, "
            "bfloat16, float32, float64, complex32, complex64, complex128, a float8 with a "
            f"fraction), so convert it, for instance by `{_other_dtype(tensor)}`"
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


def _is_masked(tensor: Tensor) -> bool:
    """Whether this is a MaskedTensor; torch does not import the class until it is used."""
    module = sys.modules.get("torch.masked.maskedtensor.core")
    return module is not None and isinstance(tensor, module.MaskedTensor)


def _other_dtype(tensor: Tensor) -> str:
    return ".dequantize()" if tensor.is_quantized else ".float()"


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
        (*span, place) for place, tensor in enumerate(tensors) for span in _spans(tensor)
    )
    device, end, last = "", 0, -1
    for on, start, stop, place in spans:
        if on == device and start < end and last != place and unplanned & {last, place}:
            raise ValueError(
                f"gradients of {name(last)} and {name(place)} share memory; give one of them "
                "memory of its own, for instance by `.clone()`"
            )
        if on != device or stop > end:
            device, end, last = on, stop, place


def _spans(tensor: Tensor) -> list[tuple[str, int, int]]:
    """The span of a tensor, or of each tensor that a wrapper holds; of those with memory."""
    return [span for stored in wrappers.held(tensor) if (span := _span(stored)) is not None]


def _span(tensor: Tensor) -> tuple[str, int, int] | None:
    """Device and bytes from the first to the last element; None for a tensor without memory."""
    stored = tensor._values() if tensor.layout == torch.sparse_coo else tensor
    if stored.numel() == 0 or stored.device.type == "meta" or is_fake(stored):
        return None
    sizes = zip(stored.shape, stored.stride(), strict=True)
    reach = 1 + sum((size - 1) * abs(stride) for size, stride in sizes)
    if (start := stored.data_ptr()) == 0:
        return None
    return str(stored.device), start, start + reach * stored.element_size()
