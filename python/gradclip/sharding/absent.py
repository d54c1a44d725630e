"""The refusal of a parameter without the attribute that should hold its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from gradclip import _core

#: What `getattr` gives where there is no such attribute; None in it is no gradient.
ABSENT: Final = object()


def refuse(parameters: Sequence[torch.Tensor], attribute: str, names: list[str] | None) -> None:
    """Refuse the first parameter without `attribute`, in the core's words.

    Raises:
        AttributeError: naming the parameter.
    """
    _core.Gradients.of(tuple(parameters), attribute, names)
