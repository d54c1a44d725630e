"""Runs what needs a GPU from a built wheel, on a machine with a GPU and no registry.

`python -m tests.gpu dist/gradclip-*.whl [pytest arguments]` unpacks the wheel into a folder of its
own, puts that before everything else, and starts pytest: what is tested is what would be installed.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ["tests/gpu", "tests/test_reports.py"]


def main(wheel: str, arguments: list[str]) -> int:
    """Unpacks, tests, and returns pytest's exit status."""
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(ROOT)])}
        plain = [f"--config-file={os.devnull}", f"--rootdir={ROOT}"]  # no plugins are asked for
        command = [sys.executable, "-m", "pytest", *plain, "-m", "gpu", *TESTS, *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m tests.gpu WHEEL [pytest arguments]")
    sys.exit(main(sys.argv[1], sys.argv[2:]))
