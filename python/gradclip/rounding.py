"""float64 to narrower types in one rounding.

torch converts float64 to a type narrower than float32 by way of float32, and so rounds twice: a
number just above a tie of the narrow type becomes the tie first. Here float32 is rounded to odd,
which keeps what was cut off in the last bit. Source: S. Boldo and G. Melquiond, "Emulation of FMA
and correctly rounded sums: proved algorithms using rounding to odd", IEEE Transactions on Computers
57 (2008).
"""

import torch
from torch import Tensor

from gradclip import _core

_DIRECT = (torch.float64, torch.float32)
"""Types that torch converts float64 to in one rounding."""

_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
DTYPES = frozenset(
    getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", *_FLOAT8)
    if hasattr(torch, name)
)
"""Types that a single number may be rounded to: no packed ones, and none without a fraction."""


def narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 values in a floating dtype, rounded once, ties to even; on their device."""
    return values.to(dtype) if dtype in _DIRECT else _to_odd(values).to(dtype)


def rounded(value: float, dtype: torch.dtype) -> float:
    """A number rounded once to a floating dtype, ties to even."""
    return float(tensor_of(value, dtype, torch.device("cpu")))


def tensor_of(values: float | list[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of numbers, each rounded once to a floating dtype, ties to even."""
    if dtype not in _DIRECT:
        odd = _core.to_odd_float32
        values = [odd(value) for value in values] if isinstance(values, list) else odd(values)
    return torch.tensor(values, dtype=dtype, device=device)


def _to_odd(values: Tensor) -> Tensor:
    """float64 values in float32, rounded to odd."""
    near = values.to(torch.float32)
    back = near.to(torch.float64)
    bits = near.view(torch.int32)
    is_off = (back != values) & ~values.isnan() & (bits & 1 == 0)
    step = 1 - 2 * (back.abs() > values.abs()).to(torch.int32)
    return torch.where(is_off, bits + step, bits).view(torch.float32)
