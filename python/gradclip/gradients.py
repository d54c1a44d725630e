"""Gradients, read and planned by the core, with those set apart that torch operations handle."""

from typing import NamedTuple

import torch
from torch import Tensor

from gradclip import _core, arguments, cuda, refusals, totals, wrappers
from gradclip.parameters import Parameters


class Gradients(NamedTuple):
    """The gradients of a call.

    `fused` says whether the engines may run; `reference` holds the places of those gradients that
    torch operations handle, all of them if not. `owned` limits what is counted of each parameter's.
    `cuda` lists the CUDA devices whose gradients the kernels handle.
    """

    core: _core.Gradients
    tensors: tuple[Tensor, ...]
    fused: bool
    reference: list[int]
    parameters: Parameters
    owned: list[tuple[int, int] | None] | None = None
    cuda: tuple[int, ...] = ()

    @property
    def device(self) -> torch.device:
        """The first gradient's device."""
        return self.tensors[0].device

    @property
    def total_dtype(self) -> torch.dtype:
        """float64 when a gradient is float64 or complex128, else float32."""
        if self.core.has_double:
            return torch.float64
        others = {self.tensors[place].dtype for place in self.reference}
        return torch.float32 if totals.DOUBLE.isdisjoint(others) else torch.float64

    @property
    def sole_cuda(self) -> int | None:
        """The CUDA device whose kernels handle every gradient; None if there is no such device."""
        alone = len(self.cuda) == 1 and not self.reference and not self.core.on_cpu
        return self.cuda[0] if alone else None

    def only(self, place: int) -> "Gradients":
        """The gradient at a place, alone."""
        alone = Parameters.of([self.tensors[place]], [self.name(place).strip("`")])
        return given(alone, [self.owned_of(place)])

    def owned_of(self, place: int) -> tuple[int, int] | None:
        """The range of logical elements that counts of the gradient at a place; None for all."""
        return self.owned[self.core.positions[place]] if self.owned else None

    def name(self, place: int) -> str:
        """How errors call the parameter of the gradient at a place."""
        return self.parameters.name(self.core.positions[place])


def of(parameters: Parameters, attribute: str = "grad") -> Gradients:
    """The gradients that parameters hold in `attribute`, each parameter once.

    Raises:
        TypeError: a gradient whose dtype or layout has no norm.
        ValueError: gradients that overlap.
    """
    core = _core.Gradients.of(parameters.tensors, arguments.attribute(attribute), parameters.names)
    return _sorted(core, parameters)


def given(tensors: Parameters, owned: list[tuple[int, int] | None] | None = None) -> Gradients:
    """Raw tensors as gradients, each object once; `owned` limits what is counted of each.

    Raises:
        TypeError, ValueError: as `of`.
    """
    core = _core.Gradients.from_tensors(tensors.tensors, tensors.names, owned)
    return _sorted(core, tensors, owned)


def _sorted(
    core: _core.Gradients,
    parameters: Parameters,
    owned: list[tuple[int, int] | None] | None = None,
) -> Gradients:
    tensors = core.tensors
    refusals.check_modes(tensors, lambda place: parameters.name(core.positions[place]))
    if foreign := core.foreign:
        tensors = _waited(tensors, foreign)
    fused = _core.is_fused()
    reference = foreign if fused else list(range(len(tensors)))
    served = core.cuda_devices if fused else ()
    if not all(map(cuda.is_served, served)):
        reference, served = sorted((*reference, *core.cuda_places)), ()
    gradients = Gradients(core, tensors, fused, reference, parameters, owned, served)
    if reference:
        unplanned = set(reference).difference(core.planned_places)
        refusals.check(tensors, reference, unplanned, gradients.name)
    return gradients


def _waited(tensors: tuple[Tensor, ...], foreign: list[int]) -> tuple[Tensor, ...]:
    """The tensors once asynchronous collectives that fill any of them are done."""
    ready = list(tensors)
    for place in foreign:
        if isinstance(ready[place], Tensor):
            ready[place] = wrappers.waited(ready[place])
    return tuple(ready)
