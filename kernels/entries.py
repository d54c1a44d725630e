"""What is compiled: one entry for each kernel, element type and kind of norm.

The numbers are those that measured best on an H200 (one warp a program, many programs, loads far
ahead). A chunk holds at most `chunk` elements: the windows of the sums leave room for that many.
"""

from dataclasses import dataclass, field

import triton.language as tl

from .extremes import extremes
from .finish import COUNT, MAX, MIN
from .scale import clamp, scale
from .sums import sums

CHUNK = 65536
"""Elements of a chunk at most."""

DTYPES = {
    "bfloat16": tl.bfloat16,
    "float16": tl.float16,
    "float32": tl.float32,
    "float64": tl.float64,
}

WORK_LIST = {"segments": "*i64", "owners": "*i32"}
WORKSPACE = {
    "stripes": "*i64",
    "details": "*i64",
    "turns": "*i32",
    "scratch": "*i64",
    "output": "*i64",
    "result": "*fp64",
}
CLIP = {"chunks": "i32", "then": "i32", "max_norm": "fp64", "eps": "fp64", "loss_scale": "fp64"}


@dataclass(frozen=True)
class Entry:
    """One image: a kernel with its compile-time arguments."""

    name: str
    kernel: object
    signature: dict
    """Run-time arguments in order -> Triton's types, with `:16` where divisible by 16."""
    constants: dict
    """Compile-time arguments."""
    warps: int
    programs: int
    """Programs to launch for each multiprocessor."""
    registers: int | None = None
    """Registers a thread may take at most."""
    chunk: int = CHUNK
    """Elements of a chunk at most."""
    programs_on: dict = field(default_factory=dict)
    """Architecture -> programs, where it is another number."""


def _bits(count):
    return (count - 1).bit_length()


def _sums(p, dtype):
    levels = {1: (1, 1, 2, 3), 2: (2, 2, 3, 4), 3: (3, 3, 4, 4)}[p]
    is_double = dtype == "float64"
    tile, band_tile = (64, 32) if is_double else (128, 64)
    growth, band_growth = _bits(CHUNK // tile), _bits(CHUNK // band_tile)
    constants = {
        "P": p,
        "DTYPE": DTYPES[dtype],
        "LEVELS": levels[list(DTYPES).index(dtype)],
        "WIDTH": 50 - growth,
        "GROWTH": growth,
        "SLACK": 2 if p == 3 else 4,
        "TILE": tile,
        "AHEAD": 4,
        "BAND_LEVELS": 7,
        "BAND_WIDTH": 50 - band_growth,
        "BAND_GROWTH": band_growth,
        "BAND_TILE": band_tile,
    }
    signature = WORK_LIST | WORKSPACE | CLIP
    return Entry(
        f"sums_{p}_{dtype}", sums, signature, constants, warps=1, programs=16, registers=96
    )


def _extremes(kind, number, dtype):
    tile = 64 if dtype == "float64" else 128
    constants = {"KIND": number.value, "DTYPE": DTYPES[dtype], "TILE": tile, "AHEAD": 4}
    signature = WORK_LIST | WORKSPACE | CLIP
    return Entry(f"{kind}_{dtype}", extremes, signature, constants, warps=1, programs=16)


def _change(kernel, argument, dtype):
    item = DTYPES[dtype].primitive_bitwidth // 8
    constants = {"DTYPE": DTYPES[dtype], "TILE": 1024 // item, "AHEAD": 2, "PARTS": 16}
    signature = WORK_LIST | argument | {"chunks": "i32"}
    return Entry(f"{kernel.__name__}_{dtype}", kernel, signature, constants, warps=2, programs=16)


ENTRIES = (
    *(_sums(p, dtype) for p in (1, 2, 3) for dtype in DTYPES if (p, dtype) != (3, "float64")),
    *(
        _extremes(kind, number, dtype)
        for kind, number in (("count", COUNT), ("max", MAX), ("min", MIN))
        for dtype in DTYPES
    ),
    *(_change(scale, {"factor": "*fp64"}, dtype) for dtype in DTYPES),
    *(_change(clamp, {"limit": "fp64"}, dtype) for dtype in DTYPES),
)
