"""The hash of the kernel sources: images and the sources they were made from belong together."""

import hashlib
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def digest(folder: Path = FOLDER) -> str:
    """SHA-256 over the names and texts of all sources of this folder, in order of their names."""
    total = hashlib.sha256()
    for source in sorted(folder.glob("*.py")):
        text = source.read_text(encoding="utf-8")  # with \n, whatever the checkout has
        total.update(f"{source.name}\0{text}\0".encode())
    return total.hexdigest()
