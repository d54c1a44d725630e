"""The CUDA engine: gradients on one device, summed and written by the kernels of the wheel.

Nothing here waits for the device. Kernels run on torch's current stream; their memory comes from
torch's allocator, so it may be reused as soon as the stream has passed them.
"""

from __future__ import annotations

import math
import os
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from gradclip import _core, images, work
from gradclip.parameters import warn
from gradclip.settings import Settings

_NOTHING, _COLLECT, _FINISH = range(3)
"""What the last program of a sum does: leave the stripes, write the sums, or the total too."""

_KINDS = {0.0: "count", 1.0: "sums_1", 2.0: "sums_2", 3.0: "sums_3", math.inf: "max"} | {
    -math.inf: "min"
}
_NO_KERNEL = {"sums_3_float64"}
_POWER = 3
_POWER_KINDS = {0.0: 0, 1.0: 1, math.inf: 4, -math.inf: 5}
"""How kernels of powers call the kinds that they take for complex elements."""

_WRITING = ("scale", "clamp")
_SIGN_BIT = -(2**63)
"""Flipped in extreme keys while kernels add to them, so that zero is none."""

_FACTOR = 2
"""Place of the factor in a result: total, coefficient, factor, float32 total."""


class _Kernel(NamedTuple):
    launch: _core.Kernel
    chunk: int
    parts: int


class _Launch(NamedTuple):
    """A kernel with the work list that it walks."""

    kernel: _Kernel
    table: work.Table


@cache
def _kernel(device: int, entry: str) -> _Kernel:
    image = images.image_for(_core.architecture(device), entry)
    parts = int(image.constants.get("PARTS", 1))
    return _Kernel(loaded(device, image), image.chunk, parts)


def loaded(device: int, image: images.Image) -> _core.Kernel:
    """An image on a device, ready to launch.

    Raises:
        RuntimeError: no CUDA driver, or the driver refuses the image.
    """
    return _core.Kernel(
        device,
        image.symbol,
        image.code,
        threads=image.threads,
        shared=image.shared,
        programs=image.programs,
        parameters=list(image.parameters),
    )


@cache
def is_served(device: int) -> bool:
    """Whether kernels run on a device; if not, the reference path does, and one warning says so.

    Raises:
        ImageError: the installed images are damaged.
        RuntimeError: no CUDA driver, or a process that was forked from one that used CUDA.
    """
    torch.cuda.init()  # refuses in a forked process, before the driver is asked for anything
    try:
        _kernel(device, "scale_float32")
    except images.NoImageError as error:
        warn(f"gradients on cuda:{device} are clipped by torch operations, slowly: {error}")
        return False
    return True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=is_served.cache_clear)


def is_single_pass(core: _core.Gradients, norm_type: float) -> bool:
    """Whether one pass gives the total; powers may need a second one, which the host decides."""
    if norm_type == 2.0:
        return True
    if core.first_complex is not None:
        return False
    kind = _KINDS.get(norm_type)
    return kind is not None and not (core.has_double and f"{kind}_float64" in _NO_KERNEL)


class CudaEngine:
    """The gradients of a call that lie on one device, for launches on the stream that is current.

    Args:
        core: gradients that were read and planned.
        device: index of the CUDA device.
    """

    def __init__(self, core: _core.Gradients, device: int) -> None:
        self.core = core
        self.index = device
        self.device = torch.device("cuda", device)
        self.stream = work.current_stream(self.device)

    def sums(self, norm_type: float, scale: _core.PowerScale | None = None) -> Tensor:
        """The carried sums of all elements: int64[144] on the device."""
        output = torch.zeros(work.SUMS_LENGTH, dtype=torch.int64, device=self.device)
        self._sum(norm_type, _COLLECT, scale=scale, output=output)
        return output

    def sums_each(self, norm_type: float, tensors: int) -> Tensor:
        """The sums of each planned tensor, carries pending: int64[tensors, 144] on the device."""
        shape = (tensors, work.SUMS_LENGTH)
        details = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self._sum(norm_type, _COLLECT, details=details)
        details[:, work.EXTREME].bitwise_xor_(_SIGN_BIT)
        return details

    def totals(self, settings: Settings) -> Tensor:
        """What a clip comes to: float64[4] on the device.

        The total of the unscaled gradients, the coefficient, what gradients are multiplied by, and
        the total once more as float32, in the first half of the last place.
        """
        result = torch.empty(4, dtype=torch.float64, device=self.device)
        clip = settings.max_norm, settings.eps, settings.scale
        self._sum(settings.norm_type, _FINISH, clip, result=result)
        return result

    def scale_(self, factor: Tensor) -> None:
        """Multiplies all gradients by a 0-dim float64 tensor on the device; 1 writes nothing."""
        self._change("scale", factor.data_ptr())

    def scale_by_result_(self, result: Tensor) -> None:
        """Multiplies all gradients by the factor of `totals`."""
        self._change("scale", result.data_ptr() + _FACTOR * result.element_size())

    def prepare(self, kind: str) -> None:
        """Makes what a change ("scale" or "clamp") needs besides gradients, which may fail."""
        self._launches(kind)
        with work.workspace(self.stream):
            pass

    def clamp_(self, limit: float) -> None:
        """Limits every element to [-limit, limit], the limit rounded to the gradient's type."""
        self._change("clamp", limit)

    def finish(
        self, sums: Tensor, norm_type: float, max_norm: float, eps: float, loss_scale: float
    ) -> Tensor:
        """As `totals`, from sums that were taken elsewhere; their carries may be pending."""
        result = torch.empty(4, dtype=torch.float64, device=self.device)
        kernel = _kernel(self.index, f"{_KINDS[norm_type]}_float32").launch
        with work.workspace(self.stream) as space:
            stripe = space.stripes[: work.SUMS_LENGTH]
            stripe.copy_(sums)
            stripe[work.EXTREME].bitwise_xor_(_SIGN_BIT)
            nothing = (0, 0, *space.addresses(None, None, result), 0, _FINISH)
            kernel.launch(self.stream.handle, 1, (*nothing, max_norm, eps, loss_scale))
        return result

    def _sum(
        self,
        norm_type: float,
        then: int,
        clip: tuple[float, float, float] = (math.inf, 0.0, 1.0),
        *,
        scale: _core.PowerScale | None = None,
        output: Tensor | None = None,
        details: Tensor | None = None,
        result: Tensor | None = None,
    ) -> None:
        kind = _KINDS.get(norm_type, "")
        last: tuple[float, ...] = clip
        if scale is not None or not is_single_pass(self.core, norm_type):
            kind, last = "powers", _power_arguments(norm_type, scale)
        launches = self._launches(kind)
        with work.workspace(self.stream) as space:
            addresses = space.addresses(details, output, result)
            for place, (kernel, table) in enumerate(launches):
                ends = then if place == len(launches) - 1 else _NOTHING
                arguments = (table.segments, table.owners, *addresses, table.chunks, ends, *last)
                kernel.launch.launch(self.stream.handle, table.chunks, arguments)
            if not launches:
                nothing = (0, 0, *addresses, 0, then, *last)
                _kernel(self.index, f"{kind}_float32").launch.launch(self.stream.handle, 1, nothing)

    def _change(self, kind: str, number: int | float) -> None:
        launches = self._launches(kind)
        done: list[str] = []
        with work.workspace(self.stream) as space:
            for kernel, table in launches:
                limit = work.rounded(number, table.dtype) if isinstance(number, float) else number
                arguments = (table.segments, table.owners, limit, space.turns, table.chunks)
                try:
                    kernel.launch.launch(self.stream.handle, table.chunks * kernel.parts, arguments)
                except RuntimeError as error:
                    raise _half_way(done, table.dtype, error) from error
                done.append(table.dtype)

    def _launches(self, kind: str) -> list[_Launch]:
        """What is to be launched, one an element type; kept with the plan."""
        kept, key = self.core.kept, (self.index, kind)
        launches: list[_Launch] | None = kept.get(key)
        if launches is None:
            launches = self._prepared(kind)
            if not self.stream.is_captured:
                kept[key] = launches
        for launch in launches:
            launch.table.use(self.stream)
        return launches

    def _prepared(self, kind: str) -> list[_Launch]:
        launches = []
        for place, listed in enumerate(self._lists(kind, _kernel(self.index, f"{kind}_float32"))):
            kernel = _kernel(self.index, f"{kind}_{listed.dtype}")
            own = self._lists(kind, kernel)[place]
            launches.append(_Launch(kernel, work.table_of(own, self.stream)))
        return launches

    def _lists(self, kind: str, kernel: _Kernel) -> list[_core.WorkList]:
        """The work lists of all element types, in chunks of the size that a kernel takes."""
        writes, reals = kind in _WRITING, kind != "powers"
        return self.core.work_lists(self.index, writes, kernel.chunk, reals)


def _half_way(done: list[str], dtype: str, error: RuntimeError) -> RuntimeError:
    """What a launch that writes gradients and failed left behind; earlier ones cannot be undone."""
    rest = f", those of {', '.join(done)} were" if done else ""
    return RuntimeError(f"gradients of {dtype} were not changed{rest}: {error}")


def _power_arguments(
    norm_type: float, scale: _core.PowerScale | None
) -> tuple[int, float, int, float]:
    """What kernels of powers take: kind, p, and what magnitudes are divided by."""
    kind = _POWER_KINDS.get(norm_type, _POWER)
    exponent = 0 if scale is None or scale.exponent is None else scale.exponent
    divisor = 0.0 if scale is None or scale.divisor is None else scale.divisor
    return kind, norm_type if kind == _POWER else 0.0, exponent, divisor
