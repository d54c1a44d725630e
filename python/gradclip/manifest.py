"""The manifest of a folder of kernel images: what each one is, checked before any is launched."""

import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

FORMAT = 1
"""The layout of manifest.json that this module reads."""

TRITON = ((3, 6), (4, 0))
"""Versions from the first up to, not including, the second pass parameters as SCRATCH says."""

SCRATCH = ("void* global_scratch", "void* profile_scratch")
"""What Triton adds after a kernel's own parameters; no kernel uses them, so both are null."""

_WORK_LIST = ("void* segments", "void* owners")
_WORKSPACE = (
    "void* stripes",
    "void* details",
    "void* turns",
    "void* scratch",
    "void* output",
    "void* result",
    "int32_t chunks",
    "int32_t then",
)
_CLIP = ("double max_norm", "double eps", "double loss_scale")
_POWER = ("int32_t kind", "double p", "int32_t exponent", "double divisor")

LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "sums": _WORK_LIST + _WORKSPACE + _CLIP,
    "extremes": _WORK_LIST + _WORKSPACE + _CLIP,
    "powers": _WORK_LIST + _WORKSPACE + _POWER,
    "digest": (*_WORK_LIST, "void* digests", "void* turns", "int32_t chunks"),
    "scale": (*_WORK_LIST, "void* factor", "void* turns", "int32_t chunks"),
    "clamp": (*_WORK_LIST, "double limit", "void* turns", "int32_t chunks"),
}
"""The parameters that callers pass to each kernel, in order, before SCRATCH."""


class ImageError(RuntimeError):
    """An image is damaged, or is not what this version launches: a broken installation."""


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


@dataclass(frozen=True)
class Place:
    """Where the code of an image is."""

    row: Row
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Manifest:
    """All images of a folder."""

    folder: Path
    triton: str
    """The version of Triton that compiled them."""
    serves: Mapping[int, int]
    """Architecture of a device -> the one whose images it runs."""
    places: Mapping[tuple[int, str], Place]

    @classmethod
    def read(cls, folder: Path) -> "Manifest | None":
        """Reads and checks the manifest of a folder; None where there is none.

        Raises:
            ImageError: it is damaged, of another format or Triton, or made from other sources.
        """
        try:
            content = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
            _check_origin(content)
            serves = {int(device): int(image) for device, image in content["serves"].items()}
            places = [_place(line, content["source"]) for line in content["images"]]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ImageError(
                f"{folder / 'manifest.json'} is damaged ({error!r}); reinstall gradclip"
            ) from error
        by_key = {(place.row.architecture, place.row.entry): place for place in places}
        return cls(folder, content["triton"], serves, by_key)

    def image(self, architecture: int, entry: str) -> Image:
        """The image of an entry for devices that this manifest serves.

        Raises:
            ImageError: there is none, or it is damaged, or takes other parameters.
        """
        place = self.places.get((self.serves[architecture], entry))
        if place is None:
            raise ImageError(
                f"{self.folder} has no image of kernel `{entry}` for sm_{architecture}; "
                "reinstall gradclip"
            )
        return checked(place.row, _unpacked(self.folder, place))


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
    if content["source"] != sources():
        raise ImageError(
            "kernel images were made from other sources than those installed; reinstall gradclip, "
            "or in a checkout run `python -m kernels.ahead_of_time`"
        )
    if content["seal"] != _hashes().seal(content):
        raise ImageError(
            "kernel images have a damaged manifest, which is not what was sealed; "
            "reinstall gradclip"
        )


def sources() -> str:
    """The hash of the kernel sources that are installed."""
    digest: str = _hashes().digest()
    return digest


def _hashes() -> Any:
    return import_module("gradclip.kernels.sources")


def _place(line: dict[str, Any], source: str) -> Place:
    return Place(row_of(line, source), line["file"], line["offset"], line["length"])


def row_of(line: Mapping[str, Any], source: str) -> Row:
    """A row from its line in a manifest."""
    values = {field.name: line[field.name] for field in fields(Row) if field.name != "source"}
    return Row(**{**values, "parameters": tuple(line["parameters"])}, source=source)


def _unpacked(folder: Path, place: Place) -> bytes:
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


def checked(row: Row, code: bytes) -> Image:
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
