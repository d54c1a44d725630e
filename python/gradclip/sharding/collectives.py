"""torch's collectives, called so that the process may exit at any moment after them.

A worker thread of a CPU backend lets go of a collective's tensors a moment after it said that they
are done, and letting go of a tensor that Python knows takes the interpreter's lock. Python ends a
thread that asks for the lock while the process exits, and C++ answers that with abort. So the
`Work`, which owns the tensors, is kept here: then it is never the worker that lets go of them.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

#: The latest collective, until the next is done or its group is gone, whose end joins its threads.
_latest: WeakKeyDictionary[dist.ProcessGroup, dist.Work] = WeakKeyDictionary()


def all_reduce(vector: torch.Tensor, operation: str, group: dist.ProcessGroup) -> None:
    """`vector` reduced in place over `group`, by "sum" or "max"."""
    op = dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX
    _done(dist.all_reduce(vector, op=op, group=group, async_op=_has_workers(vector)), group)


def reduce_scatter(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> None:
    """This rank's piece of the sum of `sent` over `group`."""
    asynchronous = _has_workers(sent)
    _done(dist.reduce_scatter_tensor(received, sent, group=group, async_op=asynchronous), group)


def _has_workers(tensor: torch.Tensor) -> bool:
    """Whether threads of the backend hold the tensor; on a device its stream does."""
    return tensor.device.type == "cpu"


def _done(work: dist.Work | None, group: dist.ProcessGroup) -> None:
    if work is None:
        return
    work.wait()
    _latest.clear()
    _latest[group] = work
