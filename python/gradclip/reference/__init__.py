"""The reference path: the same sums and the same scaling in plain torch operations.

It takes what the engines do not (sparse, float8, strides beyond two dimensions, other devices)
and everything when `GRADCLIP_FUSED=0`. It is also the readable second implementation that the
engines are compared with: for p in {0, 1, 2, inf, -inf} and integer p the bits are theirs, for
any other p they are those of `torch.pow`.

A tensor is walked in slices of `slices.SLICE_ELEMENTS`, so temporaries stay below 64 MiB whatever
its size (uncoalesced sparse tensors need more: see `sparse`). Nothing here waits for the device,
sparse tensors excepted.
"""

from .digest import digest
from .scaling import clamp_, scale_
from .sums import sums

__all__ = ["clamp_", "digest", "scale_", "sums"]
