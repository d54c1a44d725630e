"""The build backend: compiles the kernel images, then lets maturin build the package (PEP 517).

A wheel carries the images, so building one takes Triton, of the one version whose images are
released. It is a requirement of the build where it exists (Linux), and compiles for two minutes or
three; what is compiled stays in `target/images` for the next build. No image can be built
elsewhere, without that Triton, or with `pip install -C images=no .`: the build says so, and CUDA
gradients then need an installed Triton at run time, or take the reference path with a warning.

An editable install builds none: it is a checkout in which kernels change, most have no GPU, and
`make setup` should take the time that cargo takes. `make images` builds them for a checkout;
without, the installed Triton compiles a device's kernels at first use. An sdist holds sources.
"""

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import maturin
from maturin import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "gradclip"
IMAGES = PACKAGE / "kernels" / "images"

WHERE_TRITON_IS = (
    'sys_platform == "linux" and platform_machine in "x86_64 aarch64" and python_version < "3.15"'
)


def get_requires_for_build_wheel(settings: dict[str, Any] | None = None) -> list[str]:
    """What maturin needs, and the Triton that compiles the images."""
    needed = list(maturin.get_requires_for_build_wheel(settings))
    if _wants_images(settings):
        needed.append(f"triton=={_pinned()}; {WHERE_TRITON_IS}")
    return needed


def build_wheel(
    directory: str, settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Compiles the images, or says why not, and builds the wheel around them."""
    shutil.rmtree(IMAGES, ignore_errors=True)  # none of other sources is packed by mistake
    reason = _reason_against(settings)
    if reason is None:
        _compile()
    else:
        print(f"gradclip: no kernel images are built: {reason}", file=sys.stderr, flush=True)
    name: str = maturin.build_wheel(directory, settings, metadata_directory)
    return name


def _wants_images(settings: dict[str, Any] | None) -> bool:
    wish = (settings or {}).get("images", "yes")
    if wish not in ("yes", "no"):
        raise ValueError(f"build setting `images` is {wish!r}; expected yes or no")
    return bool(wish == "yes")


def _pinned() -> str:
    """The version of Triton that the compiler names."""
    text = (PACKAGE / "kernels" / "ahead_of_time.py").read_text(encoding="utf-8")
    found = re.search(r'^TRITON = "(.+)"$', text, re.MULTILINE)
    assert found, "the compiler names its Triton"
    return found[1]


def _reason_against(settings: dict[str, Any] | None) -> str | None:
    if not _wants_images(settings):
        return "images=no was asked for"
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return f"Triton is not installed; images are compiled by Triton {_pinned()}"
    if version != _pinned():
        return f"Triton is {version}; images are compiled by Triton {_pinned()}"
    return None


def _compile() -> None:
    """Runs the compiler out of the package: an sdist has no other copy of the kernels."""
    command = [sys.executable, "-m", "kernels.ahead_of_time", "--cache", ROOT / "target" / "images"]
    subprocess.run(command, cwd=PACKAGE, check=True)
