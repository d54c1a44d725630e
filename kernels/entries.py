"""What is compiled: one entry for each kernel, element type and kind of norm.

The numbers are those that measured best on an H200 (one warp a program, many programs, loads far
ahead). A chunk holds at most `chunk` elements: the windows of the sums leave room for that many.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import triton.language as tl

from .digest import digest
from .extremes import extremes
from .finish import COUNT, MAX, MIN
from .powers import powers
from .scale import clamp, scale
from .sums import sums

CHUNK = 65536
"""Elements of a chunk at most."""

PIECE_BYTES = 8192
"""What a program of a writing kernel takes at a time."""

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

POWERS = {
    "chunks": "i32",
    "then": "i32",
    "kind": "i32",
    "p": "fp64",
    "exponent": "i32",
    "divisor": "fp64",
}


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


LEVELS = {
    1: {"bfloat16": 1, "float16": 1, "float32": 2, "float64": 3},
    2: {"bfloat16": 2, "float16": 2, "float32": 3, "float64": 4},
    3: {"bfloat16": 2, "float16": 3, "float32": 4},
}
"""Accumulators a lane: enough that a chunk of Gaussian elements seldom leaves the window."""

SPARE = {(3, "bfloat16"): 1}
"""One more for the elements that fit no level, where these would not be seldom."""


class Shape(NamedTuple):
    """How a program of one warp walks its chunks."""

    tile: int = 128
    """Words at a time."""
    ahead: int = 6
    """Tiles under way."""
    registers: int = 128
    programs: int = 16
    chunk: int = CHUNK


SHAPES = {
    (1, "float64"): Shape(64, 4, chunk=CHUNK // 2),
    (2, "bfloat16"): Shape(64, 8, 80, 24),
    (2, "float32"): Shape(64, 12, 96, 24, CHUNK // 2),
    (2, "float64"): Shape(32, 16, chunk=CHUNK // 2),
    (3, "bfloat16"): Shape(64, 8, 80, 24),
    (3, "float16"): Shape(128, 8),
    (3, "float32"): Shape(64, 12, 112, 20),
}
"""What reads fastest."""


def _sums(p, dtype):
    shape = SHAPES.get((p, dtype), Shape())
    band_tile = 32 if dtype == "float64" else 64
    growth, band_growth = _bits(shape.chunk // shape.tile), _bits(shape.chunk // band_tile)
    constants = {
        "P": p,
        "DTYPE": DTYPES[dtype],
        "LEVELS": LEVELS[p][dtype],
        "WIDTH": 50 - growth,
        "SPARE": SPARE.get((p, dtype), 0),
        "GROWTH": growth,
        "SLACK": 2 if p == 3 else 4,
        "TILE": shape.tile,
        "AHEAD": shape.ahead,
        "BAND_LEVELS": 7,
        "BAND_WIDTH": 50 - band_growth,
        "BAND_GROWTH": band_growth,
        "BAND_TILE": band_tile,
    }
    signature = WORK_LIST | WORKSPACE | CLIP
    name = f"sums_{p}_{dtype}"
    registers, programs, chunk = shape.registers, shape.programs, shape.chunk
    return Entry(name, sums, signature, constants, 1, programs, registers, chunk)


def _extremes(kind, number, dtype):
    tile = 64 if dtype == "float64" else 128
    constants = {"KIND": number.value, "DTYPE": DTYPES[dtype], "TILE": tile, "AHEAD": 4}
    signature = WORK_LIST | WORKSPACE | CLIP
    return Entry(f"{kind}_{dtype}", extremes, signature, constants, warps=1, programs=32)


def _digest(dtype):
    constants = {"DTYPE": DTYPES[dtype], "TILE": 128, "AHEAD": 6}
    signature = WORK_LIST | {"digests": "*i64", "turns": "*i32", "chunks": "i32"}
    return Entry(f"digest_{dtype}", digest, signature, constants, warps=1, programs=24)


class Writer(NamedTuple):
    """How a program of a kernel that writes walks its pieces."""

    warps: int
    tile_bytes: int
    ahead: int
    programs: int
    registers: int | None = None


WRITERS = {2: Writer(1, 256, 8, 24), 4: Writer(4, 2048, 2, 8, 32), 8: Writer(4, 2048, 2, 8, 32)}
"""Bytes of an element -> what writes fastest."""


def _change(kernel, argument, dtype):
    item = DTYPES[dtype].primitive_bitwidth // 8
    writer = WRITERS[item]
    constants = {
        "DTYPE": DTYPES[dtype],
        "TILE": writer.tile_bytes // item,
        "AHEAD": writer.ahead,
        "PARTS": CHUNK * item // PIECE_BYTES,
    }
    signature = WORK_LIST | argument | {"turns": "*i32", "chunks": "i32"}
    name, warps, programs = f"{kernel.__name__}_{dtype}", writer.warps, writer.programs
    return Entry(name, kernel, signature, constants, warps, programs, writer.registers)


def _powers(name, dtype, is_complex):
    growth = _bits(CHUNK // 64)
    constants = {
        "DTYPE": DTYPES[dtype],
        "IS_COMPLEX": is_complex,
        "TILE": 64,
        "LEVELS": 7,
        "WIDTH": 50 - growth,
        "GROWTH": growth,
    }
    signature = WORK_LIST | WORKSPACE | POWERS
    return Entry(f"powers_{name}", powers, signature, constants, warps=2, programs=8)


ENTRIES = (
    *(_sums(p, dtype) for p in (1, 2, 3) for dtype in DTYPES if (p, dtype) != (3, "float64")),
    *(
        _extremes(kind, number, dtype)
        for kind, number in (("count", COUNT), ("max", MAX), ("min", MIN))
        for dtype in DTYPES
    ),
    *(_powers(dtype, dtype, False) for dtype in DTYPES),
    _powers("complex64", "float32", True),
    _powers("complex128", "float64", True),
    *(_digest(dtype) for dtype in ("bfloat16", "float32")),
    *(_change(scale, {"factor": "*fp64"}, dtype) for dtype in DTYPES),
    *(_change(clamp, {"limit": "fp64"}, dtype) for dtype in DTYPES),
)
