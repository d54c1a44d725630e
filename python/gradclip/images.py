"""The compiled kernels that travel in the wheel: what a launch needs to know, and the code itself.

`kernels/ahead_of_time.py` writes them. A device that no packed image serves gets its own, compiled
once from the same sources by an installed Triton and kept in the user's cache folder.
"""

import os
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

from gradclip.manifest import Image, ImageError, Manifest, Row, checked, row_of, sources

__all__ = ["Image", "ImageError", "NoImageError", "Row", "architectures", "image_for", "rows"]


class NoImageError(RuntimeError):
    """Nothing here can run on this architecture; the reference path can."""


def image_for(architecture: int, entry: str) -> Image:
    """The image of an entry that runs on devices of an architecture (90 for 9.0).

    Raises:
        ImageError: the installed images are damaged, or not what this version launches.
        NoImageError: no image serves the architecture, and no Triton is installed to compile one.
    """
    manifest = installed()
    if manifest is not None and architecture in manifest.serves:
        return manifest.image(architecture, entry)
    return _compiled_here(architecture, entry)


def architectures() -> tuple[int, ...]:
    """The architectures that packed images serve; empty where none were built."""
    manifest = installed()
    return tuple(sorted(manifest.serves)) if manifest else ()


def rows() -> list[Row]:
    """All packed images, by architecture and name; empty where none were built."""
    manifest = installed()
    return [place.row for _, place in sorted(manifest.places.items())] if manifest else []


@cache
def installed() -> Manifest | None:
    """The manifest of this installation, read once; None where images were not built."""
    return Manifest.read(Path(__file__).parent / "kernels" / "images")


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
    return checked(row_of(line, sources()), code)


def cache_folder() -> Path:
    """Where images compiled on this machine are kept: the user's cache folder."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "gradclip" / "images"
