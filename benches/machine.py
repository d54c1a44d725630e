"""What a result must say of where and when it was measured."""

import datetime
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch

from gradclip import _core

ROOT = Path(__file__).parent.parent


def description() -> dict[str, str | int]:
    """Date, commit, versions and machine, as plain values."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "commit": _commit(),
        "gradclip": version("gradclip"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "instructions": _core.instruction_set(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
    }


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _processor() -> str:
    """The model's name where Linux gives one."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.processor()
