"""Hashes: of the kernel sources, to which images belong, and of the manifest that says so."""

import hashlib
import json
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def digest(folder: Path = FOLDER) -> str:
    """SHA-256 over the names and texts of all sources of this folder, in order of their names."""
    total = hashlib.sha256()
    for source in sorted(folder.glob("*.py")):
        text = source.read_text(encoding="utf-8")  # with \n, whatever the checkout has
        total.update(f"{source.name}\0{text}\0".encode())
    return total.hexdigest()


def seal(manifest: dict) -> str:
    """SHA-256 over all of a manifest but its own `seal`; keys are strings, as JSON reads them."""
    content = {name: value for name, value in manifest.items() if name != "seal"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
