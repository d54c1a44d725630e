"""Exact gradient norms and gradient clipping for PyTorch.

The total norm is the correctly rounded exact value, so its bits do not depend on chunking, device,
order, rank count or sharding.
"""

from importlib.metadata import version

from gradclip.clip import clip_, clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from gradclip.clipper import Clipper
from gradclip.explain import explain
from gradclip.norms import grad_norms
from gradclip.value import clip_grad_value_, scale_

__all__ = [
    "Clipper",
    "clip_",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "explain",
    "get_total_norm",
    "grad_norms",
    "scale_",
]
__version__ = version("gradclip")
