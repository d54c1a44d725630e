"""The norm of the same gradients by gradclip, by torch and in whole numbers, side by side."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from statistics import median

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

import gradclip
from examples.exact_norm import error_in_ulps, square_root, sum_of_squares

REPEATS = 15
PIECE = 1000
SHORT_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}
DIGITS = {torch.float64: 17, torch.float32: 9, torch.bfloat16: 4}  # enough to tell neighbours apart


@dataclass(frozen=True)
class Measurement:
    """One way to the norm of one split of the gradients."""

    split: str
    method: str
    total_norm: Tensor
    exact: Fraction
    milliseconds: float

    def cells(self) -> list[str]:
        """The table's columns."""
        value, returned = self.total_norm.item(), self.total_norm.dtype
        return [
            self.split,
            self.method,
            SHORT_NAMES[returned],
            f"{value:.{DIGITS[returned]}g}",
            f"{error_in_ulps(value, self.exact, returned):.3g}",
            f"{error_in_ulps(value, self.exact, torch.float64):.3g}",
            f"{self.milliseconds:.2f}",
        ]


def splits(gradients: list[Tensor]) -> dict[str, list[Tensor]]:
    """The same elements in the same order, as tensors of other lengths."""
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    return {
        f"{len(gradients)} tensors": gradients,
        "1 tensor": [flat],
        f"{PIECE} each": list(flat.split(PIECE)),
    }


def measure(gradients: list[Tensor]) -> Iterator[Measurement]:
    """Every method on every split of the gradients."""
    exact = square_root(sum_of_squares(gradients))
    for split, tensors in splits(gradients).items():
        for method, norm in _methods(tensors).items():
            milliseconds, total_norm = _timed(norm)
            yield Measurement(split, method, total_norm, exact, milliseconds)
    milliseconds, total_norm = _timed(lambda: _by_integers(gradients), repeats=1)
    yield Measurement("any", "integers", total_norm, exact, milliseconds)


def _methods(tensors: list[Tensor]) -> dict[str, Callable[[], Tensor]]:
    methods: dict[str, Callable[[], Tensor]] = {
        "gradclip": lambda: gradclip.get_total_norm(tensors),
        "gradclip as float64": lambda: gradclip.get_total_norm(tensors, dtype=torch.float64),
        "torch": lambda: torch.nn.utils.get_total_norm(tensors),
    }
    if tensors[0].is_cuda:
        copies = [tensor.cpu() for tensor in tensors]
        methods["float64, on the CPU"] = lambda: gradclip.get_total_norm(
            copies, dtype=torch.float64
        )
    return methods


def _by_integers(gradients: list[Tensor]) -> Tensor:
    return torch.tensor(float(square_root(sum_of_squares(gradients))), dtype=torch.float64)


def _timed(norm: Callable[[], Tensor], repeats: int = REPEATS) -> tuple[float, Tensor]:
    """Median milliseconds of a call until its result is on the host, and the last result."""
    total_norm, times = norm(), []
    for _ in range(repeats):
        start = time.perf_counter()
        total_norm = norm().cpu()
        times.append(time.perf_counter() - start)
    return 1e3 * median(times), total_norm


def table(measurements: list[Measurement], title: str) -> Table:
    """All measurements of one list of gradients, a row each."""
    result = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("split", "norm by", "type", "total norm"):
        result.add_column(heading, no_wrap=True)
    for heading in ("error, ulp", "in fp64 ulp", "ms"):
        result.add_column(heading, justify="right", no_wrap=True)
    for measurement in measurements:
        result.add_row(*measurement.cells())
    return result


def verdict(measurements: list[Measurement]) -> str:
    """How many different results the exact norm and torch's had over splits and devices."""
    exact = {_bits(one) for one in measurements if one.total_norm.dtype == torch.float64}
    torchs = {_bits(one) for one in measurements if one.method == "torch"}
    return (
        f"different float64 results of gradclip and the integers: {len(exact)}; "
        f"different results of torch: {len(torchs)}"
    )


def _bits(measurement: Measurement) -> str:
    return float(measurement.total_norm).hex()
