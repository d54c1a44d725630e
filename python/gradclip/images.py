"""The compiled kernels that travel in the wheel: what a launch needs to know, and the code itself.

`kernels/ahead_of_time.py` writes them. A device that no packed image serves gets its own, compiled
once from the same sources by an installed Triton and kept in the user's cache folder.
"""

import hashlib
import json
import os
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module, resources
from pathlib import Path
from typing import Any

FORMAT = 1
"""The layout of manifest.json that this module reads."""

TRITON = ((3, 6), (4, 0))
"""Versions from the first up to, not including, the second pass parameters as SCRATCH says."""

SCRATCH = ("void* global_scratch", "void* profile_scratch")
"""What Triton adds after a kernel's own parameters; no kernel uses them, so both are null."""

_SUMS = (
    "void* segments",
    "void* owners",
    "void* stripes",
    "void* details",
    "void* turns",
    "void* scratch",
    "void* output",
    "void* result",
    "int32_t chunks",
    "int32_t then",
    "double max_norm",
    "double eps",
    "double loss_scale",
)
_SCALE = ("void* segments", "void* owners", "void* factor", "int32_t chunks")
_CLAMP = ("void* segments", "void* owners", "double limit", "int32_t chunks")

LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "sums": _SUMS,
    "extremes": _SUMS,
    "scale": _SCALE,
    "clamp": _CLAMP,
}
"""The parameters that the launcher passes to each kernel, in order, before SCRATCH."""


class ImageError(RuntimeError):
    """An image is damaged, or is not what this version launches: a broken installation."""


class NoImageError(RuntimeError):
    """Nothing here can run on this architecture; the reference path can."""


@dataclass(frozen=True)
class Row:
    """One image, without its code: a line of the manifest."""

    entry: str
    """What was compiled: a name of `kernels/entries.py`."""
    symbol: str
    """The name of the kernel in the image."""
    architecture: int
    """What it was compiled for: 90 for compute capability 9.0."""
    warps: int
    threads: int
    """Threads of a block."""
    shared: int
    """Dynamic shared memory of a block, in bytes."""
    registers: int
    """Registers of a thread."""
    programs: int
    """Blocks to launch for each multiprocessor."""
    chunk: int
    """Elements of a chunk at most."""
    parameters: tuple[str, ...]
    """C declarations of all parameters, in order; the last are SCRATCH."""
    constants: Mapping[str, int | float | str | bool]
    """The kernel's compile-time arguments, among them those that bound a chunk."""
    size: int
    """Bytes of the code."""
    sha256: str
    """SHA-256 of the code."""
    source: str
    """SHA-256 of the sources of all kernels."""


@dataclass(frozen=True)
class Image(Row):
    """One image, ready to load and launch."""

    code: bytes
    """The cubin, as `cuModuleLoadData` takes it."""


def image_for(architecture: int, entry: str) -> Image:
    """The image of an entry that runs on devices of an architecture (90 for 9.0).

    Raises:
        ImageError: the installed images are damaged, or not what this version launches.
        NoImageError: no image serves the architecture, and no Triton is installed to compile one.
    """
    manifest = _manifest()
    compiled_for = manifest.serves.get(architecture) if manifest else None
    if manifest is None or compiled_for is None:
        return _compiled_here(architecture, entry)
    where = manifest.places.get((compiled_for, entry))
    if where is None:
        raise ImageError(
            f"{manifest.folder} has no image of kernel `{entry}` for sm_{compiled_for}; "
            "reinstall gradclip"
        )
    return _checked(where.row, _unpacked(manifest.folder, where))


def architectures() -> tuple[int, ...]:
    """The architectures that packed images serve; empty where none were built."""
    manifest = _manifest()
    return tuple(sorted(manifest.serves)) if manifest else ()


def rows() -> list[Row]:
    """All packed images, by architecture and name; empty where none were built."""
    manifest = _manifest()
    return [place.row for _, place in sorted(manifest.places.items())] if manifest else []


@dataclass(frozen=True)
class _Place:
    """Where the code of an image is."""

    row: Row
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class _Manifest:
    folder: Path
    serves: dict[int, int]
    """Architecture of a device -> the one whose images it runs."""
    places: dict[tuple[int, str], _Place]


def _kernels() -> Path:
    return Path(str(resources.files("gradclip"))) / "kernels"


@cache
def _manifest() -> _Manifest | None:
    """The manifest of this installation, read once; None where images were not built."""
    return read_manifest(_kernels() / "images")


def read_manifest(folder: Path) -> "_Manifest | None":
    """Reads and checks the manifest of a folder of images; None where there is none.

    Raises:
        ImageError: it is damaged, of another format or Triton, or made from other sources.
    """
    try:
        text = (folder / "manifest.json").read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        content = json.loads(text)
        _check_origin(content)
        serves = {int(device): int(image) for device, image in content["serves"].items()}
        places = [_place(line, content["source"]) for line in content["images"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ImageError(
            f"{folder / 'manifest.json'} is damaged ({error!r}); reinstall gradclip"
        ) from error
    by_key = {(place.row.architecture, place.row.entry): place for place in places}
    return _Manifest(folder, serves, by_key)


def _check_origin(content: dict[str, Any]) -> None:
    if content["format"] != FORMAT:
        raise ImageError(
            f"kernel images have manifest format {content['format']}, this version reads {FORMAT}; "
            "reinstall gradclip"
        )
    version = tuple(int(part) for part in content["triton"].split(".")[:2])
    if not TRITON[0] <= version < TRITON[1]:
        raise ImageError(
            f"kernel images come from Triton {content['triton']}, whose parameters this version "
            "does not know; reinstall gradclip"
        )
    if content["source"] != _sources():
        raise ImageError(
            "kernel images were made from other sources than those installed; reinstall gradclip, "
            "or in a checkout run `python -m kernels.ahead_of_time`"
        )


def _sources() -> str:
    digest: str = import_module("gradclip.kernels.sources").digest()
    return digest


def _place(line: dict[str, Any], source: str) -> _Place:
    return _Place(_row(line, source), line["file"], line["offset"], line["length"])


def _row(line: dict[str, Any], source: str) -> Row:
    values = {field.name: line[field.name] for field in fields(Row) if field.name != "source"}
    return Row(**{**values, "parameters": tuple(line["parameters"])}, source=source)


def _unpacked(folder: Path, place: _Place) -> bytes:
    """The code of an image, out of the file that holds those of its architecture."""
    path = folder / place.file
    try:
        with path.open("rb") as file:
            file.seek(place.offset)
            return zlib.decompress(file.read(place.length))
    except (OSError, zlib.error) as error:
        raise ImageError(
            f"kernel images in {path} cannot be read ({error}); reinstall gradclip"
        ) from error


def _checked(row: Row, code: bytes) -> Image:
    """The image, if its code is what was written and its parameters are those of the launcher."""
    name = f"kernel image `{row.entry}` for sm_{row.architecture}"
    if hashlib.sha256(code).hexdigest() != row.sha256:
        raise ImageError(
            f"{name} is damaged (its SHA-256 is not that of the manifest); reinstall gradclip"
        )
    expected = LAYOUTS.get(row.symbol)
    if expected is None:
        raise ImageError(
            f"{name} holds `{row.symbol}`, which this version does not launch; reinstall gradclip"
        )
    if row.parameters != expected + SCRATCH:
        raise ImageError(
            f"{name} takes ({', '.join(row.parameters)}), the launcher passes "
            f"({', '.join(expected + SCRATCH)}); reinstall gradclip"
        )
    return Image(**{field.name: getattr(row, field.name) for field in fields(Row)}, code=code)


@cache
def _compiled_here(architecture: int, entry: str) -> Image:
    """Compiles an entry with the installed Triton, or finds what an earlier process compiled."""
    try:
        compiler = import_module("gradclip.kernels.compiler")
    except ImportError as error:
        raise NoImageError(
            f"no kernel image serves sm_{architecture} and no Triton is installed to compile one "
            f"({error}); `pip install triton`"
        ) from error
    try:
        line, code = compiler.compiled(entry, architecture, cache_folder())
    except compiler.CompileError as error:
        raise NoImageError(
            f"kernel `{entry}` cannot be compiled for sm_{architecture}: {error}"
        ) from error
    return _checked(_row(line, _sources()), code)


def cache_folder() -> Path:
    """Where images compiled on this machine are kept: the user's cache folder."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "gradclip" / "images"
