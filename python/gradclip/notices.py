"""What a call with nothing to clip warns of."""

from types import GeneratorType

from gradclip.parameters import Parameters, ParametersLike

EMPTY_GENERATOR = "`parameters` is an empty generator, no gradient clipping will occur."
"""torch's sentence; the functions of torch's names warn of nothing else."""

NO_GRADIENT = (
    "no parameter has a gradient: nothing is clipped; call clip_ after backward(), and pass "
    "parameters rather than gradients"
)


def of_empty(parameters: ParametersLike, given: Parameters, like_torch: bool) -> str:
    """The warning for an empty list, or an empty string.

    Args:
        parameters: what the caller passed.
        given: its list.
        like_torch: whether to warn where torch's function does, with its sentence.
    """
    if given.tensors:
        return ""
    if like_torch:
        return EMPTY_GENERATOR if isinstance(parameters, GeneratorType) else ""
    return given.nothing


def of_no_gradient(given: Parameters, like_torch: bool) -> str:
    """The warning for parameters of which none has a gradient, or an empty string."""
    return NO_GRADIENT if given.tensors and not like_torch else ""
