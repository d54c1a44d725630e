"""How fast this machine's memory is when hardly anything is computed, measured with torch."""

from collections.abc import Callable

import torch
from torch import Tensor

from benches.timing import in_turns

ELEMENTS = 1 << 27  # 512 MiB of float32: far beyond any cache


def bandwidths() -> dict[str, float]:
    """Bytes a second of a pure read, of a copy (read and write) and of an update in place."""
    source, target = torch.ones(ELEMENTS), torch.empty(ELEMENTS)
    calls: dict[str, Callable[[], Tensor]] = {
        # an integer sum: of torch's reductions the one nearest to a pure read
        "read": lambda: source.view(torch.int64).sum(),
        "copy": lambda: target.copy_(source),
        "in place": lambda: source.mul_(1.0),
    }
    passes = {"read": 1, "copy": 2, "in place": 2}
    timings = in_turns(dict(calls))
    return {name: passes[name] * source.nbytes / timings[name].median for name in calls}
