"""What the interpreter lacks, and quiet NumPy."""

from collections.abc import Iterator

import numpy as np
import pytest
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.interpreter import TensorHandle


def _power(base: tl.tensor, exponent: tl.tensor) -> tl.tensor:
    values = np.power(base.handle.data, exponent.handle.data)
    return tl.tensor(TensorHandle(values, tl.float64), base.type)


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Functions of the device's library by NumPy; infinities and wrapping integers are no news."""
    monkeypatch.setattr(libdevice, "pow", _power)
    with np.errstate(all="ignore"):
        yield
