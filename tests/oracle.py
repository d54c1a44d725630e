"""What norms and clipped gradients must be, bit for bit, in integers of unlimited size.

total        p = 0: number of non-zero elements; p = 1, 2, 3, ...: (sum |x|**p)**(1 / p), rounded
             once to float64, ties to even; p = inf, -inf: the largest, smallest magnitude
non-finite   a NaN anywhere gives NaN; else an infinity anywhere gives inf (p = -inf apart)
coefficient  min(1, max_norm / (total + eps)) in float64
clipped      float64: x * c; narrower types: float32(x) * float32(c) in float32, then rounded to the
             type; c = 1 writes nothing
"""

import math
from collections.abc import Iterable

import torch
from mpmath import mp, mpf  # type: ignore[import-untyped]

_SMALLEST = -1074
"""Every float64 is an integer times 2**_SMALLEST."""


def elements(tensors: Iterable[torch.Tensor]) -> list[float]:
    """Every element of every tensor as float64; a complex element gives its two parts.

    What a sparse tensor lists more than once for an index counts as its sum: exact, then float64.
    """
    values: list[float] = []
    for tensor in tensors:
        plain = tensor.detach().cpu()
        plain = dense(plain) if plain.layout != torch.strided else plain
        if plain.is_complex():
            plain = torch.view_as_real(plain.resolve_conj())
        values += plain.resolve_neg().to(torch.float64).flatten().tolist()
    return values


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The dense form of a sparse tensor; float64 or complex128 where an index may be repeated."""
    if tensor.is_coalesced() and tensor.element_size() > 1:
        return tensor.to_dense()
    listed = tensor._values()
    parts = torch.view_as_real(listed) if listed.is_complex() else listed.unsqueeze(-1)
    columns = parts.to(torch.float32 if parts.element_size() == 1 else parts.dtype)
    columns = columns.to(torch.float64).flatten(1)
    dims = tensor.sparse_dim()
    sums = torch.zeros(*tensor.shape[:dims], columns.shape[1], dtype=torch.float64)
    found: dict[tuple[int, ...], list[list[float]]] = {}
    for index, row in zip(tensor._indices().T.tolist(), columns.tolist(), strict=True):
        found.setdefault(tuple(index), []).append(row)
    for place, rows in found.items():
        sums[place] = torch.tensor(
            [exact_sum(column) for column in zip(*rows, strict=True)], dtype=torch.float64
        )
    values = sums.reshape(*tensor.shape, parts.shape[-1])
    return torch.view_as_complex(values) if listed.is_complex() else values.squeeze(-1)


def exact_sum(values: Iterable[float]) -> float:
    """The float64 nearest to a sum, ties to even; what IEEE arithmetic gives if one is not finite.

    By integers: `math.fsum` fails where a partial sum overflows.
    """
    listed = list(values)
    if not all(map(math.isfinite, listed)):
        return sum(value for value in listed if not math.isfinite(value))
    whole = sum(_whole(value) if value > 0 else -_whole(value) for value in listed)
    nearest = nearest_root(abs(whole), 1)
    return -nearest if whole < 0 else nearest


def total_norm(tensors: Iterable[torch.Tensor], p: float = 2.0) -> float:
    """The norm of all tensors together, for p = 0, a positive integer, inf or -inf."""
    values = elements(tensors)
    if not values:
        return 0.0
    if any(map(math.isnan, values)):
        return math.nan
    if math.isinf(p):
        return (max if p > 0 else min)(map(abs, values))
    if p == 0:
        return float(sum(value != 0 for value in values))
    if any(map(math.isinf, values)):
        return math.inf
    assert p > 0
    assert p == int(p)
    degree = int(p)
    return nearest_root(sum(_whole(value) ** degree for value in values), degree)


def _whole(value: float) -> int:
    numerator, denominator = abs(value).as_integer_ratio()
    return (numerator << -_SMALLEST) // denominator


def nearest_root(power: int, degree: int) -> float:
    """The float64 nearest to power**(1 / degree) * 2**_SMALLEST, ties to even; inf past the end.

    54 leading bits of the integer root and whether anything is left decide the rounding.
    """
    if power == 0:
        return 0.0
    shift = max(54 * degree - power.bit_length(), degree) // degree + 1
    root = _floor_root(power << shift * degree, degree)
    is_exact = root**degree == power << shift * degree
    excess = max(root.bit_length() - 53, shift)
    whole, rest = root >> excess, root & ((1 << excess) - 1)
    half = 1 << (excess - 1)
    if rest > half or (rest == half and (whole & 1 or not is_exact)):
        whole += 1
    try:
        return math.ldexp(whole, excess - shift + _SMALLEST)
    except OverflowError:
        return math.inf


def _floor_root(value: int, degree: int) -> int:
    """The largest integer whose power is at most `value`, by Newton's iteration from above."""
    if degree == 2:
        return math.isqrt(value)
    guess = 1 << -(-value.bit_length() // degree)
    while True:
        better = ((degree - 1) * guess + value // guess ** (degree - 1)) // degree
        if better >= guess:
            return guess
        guess = better


def nearest_root_of_squares(parts: Iterable[float]) -> float:
    """|z| of the parts of a complex number."""
    return nearest_root(sum(_whole(part) ** 2 for part in parts), 2)


def total_norm_to_many_digits(tensors: Iterable[torch.Tensor], p: float) -> mpf:
    """The norm for any real p but 0, in 400 bits, of finite elements (none 0 where p < 0)."""
    with mp.workprec(400):
        power = sum((abs(mpf(value)) ** mpf(p) for value in elements(tensors)), mpf(0))
        return power ** (1 / mpf(p))


def coefficient(total: float, max_norm: float, eps: float = 1e-6) -> float:
    """The clip coefficient in float64."""
    if max_norm == math.inf:
        return 1.0
    ratio = max_norm / (total + eps) if total + eps else math.inf
    return ratio if math.isnan(ratio) else min(1.0, ratio)


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """What a gradient must be after its multiplication by a factor."""
    if factor == 1.0:
        return tensor.clone()
    if tensor.is_complex():
        return torch.view_as_complex(scaled(torch.view_as_real(tensor), factor))
    if tensor.dtype == torch.float64:
        return tensor * factor
    narrow_factor = torch.tensor(factor, dtype=torch.float32)
    return (tensor.to(torch.float32) * narrow_factor).to(tensor.dtype)


def clipped(tensor: torch.Tensor, total: float, max_norm: float, eps: float = 1e-6) -> torch.Tensor:
    """What a gradient must be after a clip by the given total norm."""
    return scaled(tensor, coefficient(total, max_norm, eps))


def ulps_apart(value: float, wanted: float | mpf) -> float:
    """The distance of a float64 from a number, in units of the number's last place."""
    if float(wanted) == value:
        return 0.0
    with mp.workprec(400):
        return float(abs(mpf(value) - wanted) / math.ulp(float(wanted)))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have one type, one shape and the same bits, NaN included."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    flat = plain.cpu().resolve_conj().resolve_neg().contiguous().flatten()
    return flat.view(torch.uint8)
