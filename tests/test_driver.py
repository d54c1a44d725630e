"""Without a CUDA driver, what needs one says so."""

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import pytest

from gradclip import _core

LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def has_driver() -> bool:
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def load(device: int) -> _core.Kernel:
    return _core.Kernel(device, "sums", b"", threads=32, shared=0, programs=1, parameters=[])


@pytest.mark.skipif(has_driver(), reason="this machine has a CUDA driver")
@pytest.mark.parametrize("call", [_core.architecture, load])
def test_no_driver(call: Callable[[int], Any]) -> None:
    words = r"the CUDA driver cannot be loaded \(.*\); install the NVIDIA driver"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=words):
            call(0)
