"""The CUDA engine: gradients on one device, summed and written by the kernels of the wheel.

Nothing here waits for the device. Kernels run on torch's current stream; their memory comes from
torch's allocator, so it may be reused as soon as the stream has passed them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gradclip import _core, work
from gradclip.parameters import warn
from gradclip.reference import limbs
from gradclip.settings import Settings

if TYPE_CHECKING:
    from gradclip import images

_COLLECT, _FINISH = 1, 2
"""What the last program of a sum does: write the sums, or the total too."""

_KINDS = {0.0: "count", 1.0: "sums_1", 2.0: "sums_2", 3.0: "sums_3", math.inf: "max"} | {
    -math.inf: "min"
}
_NO_KERNEL = {"sums_3_float64"}
_POWER = 3
_POWER_KINDS = {0.0: 0, 1.0: 1, math.inf: 4, -math.inf: 5}
"""How kernels of powers call the kinds that they take for complex elements."""

_WRITING = ("scale", "clamp")
_DIGEST = "digest"
_NO_CLIP = math.inf, 0.0, 1.0
_SIGN_BIT = -(2**63)
"""Flipped in extreme keys while kernels add to them, so that zero is none."""

_RESULT_LENGTH = 8
_FACTOR_OFFSET = 16
"""Bytes before the factor in a result, which holds total, coefficient, factor, float32 total."""


class _Kernel(NamedTuple):
    code: _core.Kernel
    chunk: int
    parts: int


class _Step(NamedTuple):
    """Launches, one an element type, with the work lists that they walk."""

    launches: _core.Launches
    tables: list[work.Table]


@cache
def _kernel(device: int, entry: str) -> _Kernel:
    from gradclip import images  # with the first kernel: without a device nobody needs it

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
    from gradclip import images

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


@cache
def _device(index: int) -> torch.device:
    return torch.device("cuda", index)


class CudaEngine:
    """The gradients of a call that lie on one device, for launches on the stream that is current.

    Args:
        core: gradients that were read and planned.
        device: index of the CUDA device.
    """

    def __init__(self, core: _core.Gradients, device: int) -> None:
        self.core = core
        self.index = device
        self.device = _device(device)
        self.stream = work.current_stream(self.device)

    def sums(self, norm_type: float, scale: _core.PowerScale | None = None) -> Tensor:
        """The carried sums of all elements: int64[144] on the device."""
        if limbs.is_tiny(norm_type):
            return _tiny(self.sums, norm_type)
        output = torch.zeros(work.SUMS_LENGTH, dtype=torch.int64, device=self.device)
        self._sum(norm_type, scale, output=output.data_ptr())
        return output

    def sums_each(self, norm_type: float, tensors: int) -> Tensor:
        """The sums of each planned tensor, carries pending: int64[tensors, 144] on the device."""
        if limbs.is_tiny(norm_type):
            return _tiny(lambda p: self.sums_each(p, tensors), norm_type)
        shape = (tensors, work.SUMS_LENGTH)
        details = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self._sum(norm_type, details=details.data_ptr())
        details[:, work.EXTREME].bitwise_xor_(_SIGN_BIT)
        return details

    def digests(self, tensors: int) -> Tensor:
        """The digest of each planned tensor: int64[tensors] on the device.

        0 for tensors elsewhere, and for those that lie in memory in another order than the logical.
        """
        found = torch.zeros(tensors, dtype=torch.int64, device=self.device)
        step = self._step(_DIGEST)
        with work.workspace(self.stream) as space:
            step.launches.digest(self.stream.handle, space.turns, found.data_ptr())
        return found

    def totals(self, settings: Settings) -> Tensor:
        """What a clip comes to: float64[4] on the device, as float32[8].

        The total of the unscaled gradients, the coefficient, what gradients are multiplied by, and
        the total once more as float32, in the first half of the last place.
        """
        result = self._result()
        step = self._step(_KINDS[settings.norm_type])
        clip = settings.max_norm, settings.eps, settings.scale
        with work.workspace(self.stream) as space:
            addresses = space.addresses(result=result.data_ptr())
            step.launches.sum(self.stream.handle, addresses, _FINISH, clip)
        return result

    def scale_(self, factor: Tensor) -> None:
        """Multiplies all gradients by a 0-dim float64 tensor on the device; 1 writes nothing."""
        self._scale_by(factor.data_ptr())

    def scale_by_result_(self, result: Tensor) -> None:
        """Multiplies all gradients by the factor of `totals`."""
        self._scale_by(result.data_ptr() + _FACTOR_OFFSET)

    def clamp_(self, limit: float) -> None:
        """Limits every element to [-limit, limit], the limit rounded to the gradient's type."""
        step = self._step("clamp")
        limits = [work.rounded(limit, table.dtype) for table in step.tables]
        with work.workspace(self.stream) as space:
            step.launches.clamp(self.stream.handle, space.turns, limits)

    def prepare(self, kind: str) -> None:
        """Makes what a change ("scale" or "clamp") needs besides gradients, which may fail."""
        self._step(kind)
        with work.workspace(self.stream):
            pass

    def finish(
        self, sums: Tensor, norm_type: float, max_norm: float, eps: float, loss_scale: float
    ) -> Tensor:
        """As `totals`, float64[4], from sums of elsewhere whose carries may be pending."""
        result = self._result()
        launches = self._over_nothing(_KINDS[norm_type])
        with work.workspace(self.stream) as space:
            stripe = space.stripes[: work.SUMS_LENGTH]
            stripe.copy_(sums)
            stripe[work.EXTREME].bitwise_xor_(_SIGN_BIT)
            addresses = space.addresses(result=result.data_ptr())
            launches.sum(self.stream.handle, addresses, _FINISH, (max_norm, eps, loss_scale))
        return result.view(torch.float64)

    def _result(self) -> Tensor:
        return torch.empty(_RESULT_LENGTH, dtype=torch.float32, device=self.device)

    def _sum(
        self,
        norm_type: float,
        scale: _core.PowerScale | None = None,
        *,
        output: int = 0,
        details: int = 0,
    ) -> None:
        one_pass = scale is None and is_single_pass(self.core, norm_type)
        step = self._step(_KINDS[norm_type] if one_pass else "powers")
        with work.workspace(self.stream) as space:
            where = self.stream.handle, space.addresses(details=details, output=output)
            if one_pass:
                step.launches.sum(*where, _COLLECT, _NO_CLIP)
            else:
                step.launches.powers(*where, _COLLECT, _power_arguments(norm_type, scale))

    def _scale_by(self, factor: int) -> None:
        step = self._step("scale")
        with work.workspace(self.stream) as space:
            step.launches.scale(self.stream.handle, space.turns, factor)

    def _step(self, kind: str) -> _Step:
        """What is to be launched; kept with the plan."""
        kept, key = self.core.kept, (self.index, kind)
        step: _Step | None = kept.get(key)
        if step is None:
            step = self._prepared(kind)
            if not self.stream.is_captured:
                kept[key] = step
        for table in step.tables:
            table.use(self.stream)
        return step

    def _prepared(self, kind: str) -> _Step:
        launches, tables = [], []
        for place, listed in enumerate(self._lists(kind, _kernel(self.index, f"{kind}_float32"))):
            kernel = _kernel(self.index, f"{kind}_{listed.dtype}")
            table = work.table_of(self._lists(kind, kernel)[place], self.stream)
            launches.append((kernel.code, kernel.parts, table.listed, table.address))
            tables.append(table)
        if not launches and kind not in (*_WRITING, _DIGEST):
            return _Step(self._over_nothing(kind), [])
        return _Step(_core.Launches(launches), tables)

    def _over_nothing(self, kind: str) -> _core.Launches:
        return _core.Launches.over_nothing(_kernel(self.index, f"{kind}_float32").code)

    def _lists(self, kind: str, kernel: _Kernel) -> list[_core.WorkList]:
        """The work lists of all element types, in chunks of the size that a kernel takes."""
        if kind == _DIGEST:
            return self.core.digest_lists(self.index, kernel.chunk)
        writes, reals = kind in _WRITING, kind != "powers"
        return self.core.work_lists(self.index, writes, kernel.chunk, reals)


def _tiny(sums: Callable[[float], Tensor], norm_type: float) -> Tensor:
    """The sums of a tiny p from those of others: magnitudes, and high above them their count."""
    vector = sums(1.0)
    place = limbs.UNIT_OF_COUNT
    counts = sums(0.0)[..., limbs.UNIT_LIMB : limbs.UNIT_LIMB + limbs.LIMBS - place]
    infinities = vector[..., limbs.POSITIVE_INFINITY] + vector[..., limbs.NEGATIVE_INFINITY]
    vector[..., place : limbs.LIMBS] += counts
    vector[..., place] -= infinities  # not zero, but without a term
    if norm_type < 0:
        vector[..., limbs.ZEROS] = sums(-1.0)[..., limbs.ZEROS]
    return vector


def _power_arguments(
    norm_type: float, scale: _core.PowerScale | None
) -> tuple[int, float, int, float]:
    """What kernels of powers take: kind, p, and what magnitudes are divided by."""
    kind = _POWER_KINDS.get(norm_type, _POWER)
    exponent = 0 if scale is None or scale.exponent is None else scale.exponent
    divisor = 0.0 if scale is None or scale.divisor is None else scale.divisor
    return kind, norm_type if kind == _POWER else 0.0, exponent, divisor
