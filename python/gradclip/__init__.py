"""Exact gradient norms and gradient clipping for PyTorch.

The total norm is the correctly rounded exact value, so its bits do not depend on chunking, device,
order, rank count or sharding.
"""

import types as _types
from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING

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
__version__ = _version("gradclip")

_PUBLIC_MODULES = ("sharding",)


def __dir__() -> list[str]:
    return sorted({*__all__, *_PUBLIC_MODULES, "__doc__", "__name__", "__version__"})


if not _TYPE_CHECKING:  # a type checker would take every name for an attribute

    def __getattr__(name: str) -> object:
        from gradclip.arguments import suggestion

        hint = suggestion(name, __all__)
        raise AttributeError(f"module 'gradclip' has no attribute {name!r}{hint}")


def _hide_modules() -> None:
    """Takes modules such as `clip` out of the names in which users look for functions.

    An import still finds them.
    """
    for name, value in list(globals().items()):
        is_public = name.startswith("_") or name in _PUBLIC_MODULES
        if isinstance(value, _types.ModuleType) and not is_public:
            del globals()[name]


_hide_modules()
