"""Which gradients are not finite, for the error that refuses to clip them."""

import math

from gradclip import engine
from gradclip.gradients import Gradients

_NAMED = 3
_COUNTS = slice(136, 139)
"""Where sums hold the numbers of NaN, +inf and -inf elements."""


def describe_nonfinite(found: Gradients) -> str:
    """How many gradients hold NaN or infinite elements, and how many the first three of them hold.

    Empty where all are finite, as those of a total that overflowed may be.
    Gradients of which this rank counts a range are described by that range. A complex element is
    infinite when its magnitude is.
    """
    bad = []
    for index, sums in enumerate(engine.sums_each(found, math.inf)):
        nan, positive, negative = sums.to_list()[_COUNTS]
        if nan or positive or negative:
            bad.append((index, nan, positive + negative))
    if not bad:
        return ""
    if len(bad) == 1:
        return f"the gradient of {_holds(found, *bad[0])}"
    named = ", ".join(_holds(found, *counts) for counts in bad[:_NAMED])
    rest = f", and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    return f"{len(bad)} of {len(found.tensors)} gradients are not finite: {named}{rest}"


def _holds(found: Gradients, index: int, nan: int, infinite: int) -> str:
    owned = found.owned_of(index)
    elements = found.tensors[index].numel() if owned is None else owned[1] - owned[0]
    counts = [f"{count} {kind}" for count, kind in ((nan, "NaN"), (infinite, "infinite")) if count]
    return f"{found.name(index)} holds {' and '.join(counts)} of {elements} elements"
