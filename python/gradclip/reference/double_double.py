"""Numbers of 106 bits as unevaluated sums of two float64: (high, low).

The order of operations is that of the engines, which have fused multiply-adds where this has
Dekker's splits, so the bits agree while nothing leaves float64's range. Source: T. J. Dekker, "A
floating-point technique for extending the available precision", Numerische Mathematik 18 (1971).
"""

import torch

_SPLIT = 2.0**27 + 1.0


def integer_power(x: torch.Tensor, power: int) -> torch.Tensor:
    """Powers (at least the first), bit by bit of `power` from the highest, rounded to float64."""
    zero = torch.zeros_like(x)
    high, low = x, zero
    for bit in bin(power)[3:]:
        high, low = _multiply(high, low, high, low)
        if bit == "1":
            high, low = _multiply(high, low, x, zero)
    return high + low


def hypotenuse(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The root of a * a + b * b, for magnitudes in or below [1, 2)."""
    a_square, b_square = a * a, b * b
    high, low = _add(
        (a_square, _product_rest(a, a, a_square)), (b_square, _product_rest(b, b, b_square))
    )
    root = torch.sqrt(high)
    square = root * root
    rest = (high - square) - _product_rest(root, root, square)
    return root + (rest + low) / (2.0 * root)


def _add(
    a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    high, high_rest = _two_sum(a[0], b[0])
    low, low_rest = _two_sum(a[1], b[1])
    high, high_rest = _fast_sum(high, high_rest + low)
    return _fast_sum(high, high_rest + low_rest)


def _multiply(
    a: torch.Tensor, a_rest: torch.Tensor, b: torch.Tensor, b_rest: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    product = a * b
    return _fast_sum(product, _product_rest(a, b, product) + (a * b_rest + a_rest * b))


def _fast_sum(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact sum, where |a| >= |b|."""
    high = a + b
    return high, b - (high - a)


def _two_sum(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact sum."""
    high = a + b
    other = high - a
    return high, (a - (high - other)) + (b - other)


def _product_rest(a: torch.Tensor, b: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    """What rounding left of a product: fma(a, b, -product)."""
    a_high, a_low = _split(a)
    b_high, b_low = _split(b)
    return ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x * _SPLIT
    high = wide - (wide - x)
    return high, x - high
