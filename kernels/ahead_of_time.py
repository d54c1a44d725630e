"""Compiles every entry for every architecture, without a GPU: `python -m kernels.ahead_of_time`.

Writes a folder of images: manifest.json, and for each architecture a file of its images, each one
compressed on its own: a launch reads and unpacks only the image that it needs. (All images of an
architecture in one xz stream take 40% of the room, but some Pythons are built without lzma.)
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import zlib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from .sources import FOLDER, digest, seal

FORMAT = 1
"""Layout of manifest.json; gradclip/images.py reads this one."""

TRITON = "3.6.0"
"""The version whose images are released; another one is for trying things out."""

SERVES = {80: 80, 86: 80, 89: 80, 90: 90, 100: 100, 103: 103, 120: 120}
"""Device -> the architecture compiled for it.

Code for 8.0 runs on 8.6 and 8.9. From 9.0 on Triton compiles for one architecture alone (sm_90a,
sm_100a, ...), so each needs its own.
"""

IMAGES = FOLDER / "images"
CACHE = FOLDER.parent / "target" / "images"


def main(arguments=None):
    """Compiles, packs and prints what came out; returns the exit status."""
    options = _options(arguments)
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # a third of an image, for debuggers only
    os.environ.pop("TRITON_INTERPRET", None)
    from .compiler import ENTRIES, CompileError, triton  # after the environment is set

    start = time.monotonic()
    serves = {device: SERVES[device] for device in options.archs}
    names = options.entries or [entry.name for entry in ENTRIES]
    try:
        images = compile_all(names, sorted({*serves.values()}), options.cache)
    except CompileError as error:
        print(f"kernels.ahead_of_time: {error}", file=sys.stderr)
        return 1
    write(options.out, images, serves, triton.__version__)
    size = sum(file.stat().st_size for file in options.out.iterdir())
    print(
        f"{len(images)} kernel images by Triton {triton.__version__} in {options.out}: "
        f"{size / 2**20:.1f} MiB for sm_{', sm_'.join(map(str, serves))}; "
        f"{time.monotonic() - start:.0f} s"
    )
    return 0


def _options(arguments):
    parser = argparse.ArgumentParser("python -m kernels.ahead_of_time", description=__doc__)
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder of the images")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of what is compiled")
    parser.add_argument(
        "--archs",
        type=lambda text: [int(part) for part in text.split(",")],
        default=list(SERVES),
        help=f"devices, of {','.join(map(str, SERVES))}",
    )
    parser.add_argument(
        "--entries", type=lambda text: text.split(","), help="only these, to try things out"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.archs) - set(SERVES):
        parser.error(f"unknown architectures {sorted(unknown)}; known are {sorted(SERVES)}")
    return options


def compile_all(names, architectures, cache):
    """(manifest line, code) of these entries for each of the architectures, on all cores."""
    jobs = [(name, architecture, cache) for name in names for architecture in architectures]
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["TRITON_CACHE_DIR"] = scratch  # the images are what is kept
        with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            return list(pool.map(_compile_one, jobs))


def _compile_one(job):
    from .compiler import compiled

    return compiled(*job)


def write(folder, images, serves, version):
    """Packs images beside the folder, then puts the new folder in the old one's place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".images-"))
    lines = [line for number in sorted({*serves.values()}) for line in _pack(aside, number, images)]
    manifest = {
        "format": FORMAT,
        "triton": version,
        "source": digest(),
        "serves": {str(device): image for device, image in serves.items()},
        "images": lines,
    }
    manifest["seal"] = seal(manifest)
    (aside / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    aside.chmod(0o755)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)


def _pack(folder, architecture, images):
    """Writes the images of an architecture to one file; their lines say where each one lies."""
    name = f"sm_{architecture}.images"
    lines = []
    with (folder / name).open("wb") as file:
        for line, code in images:
            if line["architecture"] == architecture:
                offset = file.tell()
                length = file.write(zlib.compress(code, 9))
                lines.append({**line, "file": name, "offset": offset, "length": length})
    return lines


if __name__ == "__main__":
    sys.exit(main())
