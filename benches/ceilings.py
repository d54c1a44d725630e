"""How fast this machine's memory is when hardly anything is computed, measured with torch."""

from collections.abc import Callable

import torch
from torch import Tensor

from benches.timing import in_turns

BUFFER_BYTES = 1 << 29  # far beyond any cache


def bandwidths() -> dict[str, float]:
    """Bytes a second of a pure read, of a copy (read and write) and of an update in place."""
    source, target = torch.ones(BUFFER_BYTES // 4), torch.empty(BUFFER_BYTES // 4)
    calls: dict[str, Callable[[], Tensor]] = {
        "read": read_of(BUFFER_BYTES),
        "copy": lambda: target.copy_(source),
        "in place": lambda: source.mul_(1.0),
    }
    passes = {"read": 1, "copy": 2, "in place": 2}
    timings = in_turns(dict(calls))
    return {name: passes[name] * BUFFER_BYTES / timings[name].median for name in calls}


def read_of(n_bytes: int) -> Callable[[], Tensor]:
    """A call that reads so many bytes and hardly computes: of torch's reductions the quickest."""
    buffer = torch.ones(max(1, n_bytes // 8), dtype=torch.int64)
    return lambda: buffer.sum()
