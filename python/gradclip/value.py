"""Clipping by value."""

import torch
from torch import Tensor

from gradclip import arguments, compiled, engine
from gradclip.grad_mode import without_grad
from gradclip.gradients import Gradients
from gradclip.parameters import ParametersLike, listed, warn
from gradclip.sharding.clip import local_gradients


@without_grad
def clip_grad_value_(
    parameters: ParametersLike,
    clip_value: float,
    foreach: bool | None = None,
    *,
    grad: str = "grad",
) -> None:
    """Limits every gradient element to [-clip_value, clip_value] in place; NaN stays NaN.

    Args:
        parameters: as for `gradclip.clip_`; complex gradients are refused, as they have no order.
        clip_value: the limit, >= 0, rounded to each gradient's dtype.
        foreach: accepted, changes nothing: there is one engine.
        grad: the attribute that holds a parameter's gradient.

    Raises:
        ValueError: a negative or NaN `clip_value`, gradients that overlap.
        TypeError: a gradient that is complex, integer, boolean or quantized.
        In every case before any gradient was written.
    """
    if torch.compiler.is_compiling():
        return compiled.clamp_(parameters, grad, clip_value)
    clip_value = arguments.limit(clip_value, "clip_value")
    found = local_gradients(listed(parameters), grad, linear=False)
    refuse_complex(found)
    if found.tensors:
        engine.clamp_(found, clip_value)
    return None


def refuse_complex(found: Gradients) -> None:
    """Raises TypeError for a complex gradient."""
    places = (found.core.first_complex, *found.reference)
    for place in places:
        if place is not None and found.tensors[place].is_complex():
            raise TypeError(
                f"gradient of {found.name(place)} is {found.tensors[place].dtype}, which has no "
                "order to clip values by; use gradclip.clip_"
            )


@without_grad
def scale_(tensors: ParametersLike, coefficient: float | Tensor) -> None:
    """Multiplies raw tensors by a coefficient in place, as `gradclip.clip_` scales gradients.

    Args:
        tensors: gradients themselves (not parameters), in any form that `gradclip.clip_` takes.
        coefficient: a number, or a 0-dim tensor on the tensors' device, which the host does not
            read. float64 tensors are multiplied in float64, narrower ones in float32. 1 writes
            nothing.

    Raises:
        ValueError: a coefficient with more than one element, tensors that overlap.
        TypeError: a Module, whose weights would be scaled, or a tensor that is integer, boolean or
            quantized.
    """
    if isinstance(tensors, torch.nn.Module):
        raise TypeError(
            f"`tensors` is a {type(tensors).__name__}, whose weights would be scaled; pass "
            "gradients, or model.parameters() if weights are meant"
        )
    if torch.compiler.is_compiling():
        return compiled.scale_(tensors, coefficient)
    coefficient = arguments.coefficient(coefficient)
    given = listed(tensors)
    if given.nothing:
        warn(given.nothing)
    engine.scale_(local_gradients(given, None), coefficient)
    return None
