"""The sharded clip over NCCL: one table for the layouts, on any number of GPUs from 2 on.

    torchrun --standalone --nproc-per-node 2 -m benches.nccl --out nccl.json

from the root of the tree, with the wheel installed. `--cpu` tries it with gloo and a small model.
A check that takes longer than its limit ends every rank.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import gc
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gradclip
from benches.nccl import checks, model

LIMIT_SECONDS = 60

Row = dict[str, Any]


def main() -> None:
    """Run all checks of all layouts; rank 0 prints the table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="gloo and a small model")
    parser.add_argument("--out", type=Path, help="where the rows go as JSON")
    asked = parser.parse_args()
    device = _start(asked.cpu)
    rows = [_measured(name, device, asked.cpu) for name in model.LAYOUTS]
    rows.append(_offloaded(device, asked.cpu))
    if dist.get_rank() == 0:
        print(_table(rows), flush=True)
        if asked.out:
            text = json.dumps({"machine": _machine(device), "rows": rows}, indent=1)
            asked.out.write_text(text + "\n", encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(any(_is_bad(value) for row in rows for value in row.values()))


def _start(cpu: bool) -> torch.device:
    faulthandler.enable()
    limit = datetime.timedelta(seconds=LIMIT_SECONDS)
    if cpu:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=limit)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=limit, device_id=device)
    return device


def _measured(name: str, device: torch.device, cpu: bool) -> Row:
    """Every check of one layout."""
    subject, expected = _limited(lambda: _subject(model.LAYOUTS[name], device, cpu))
    row: Row = {"layout": name}
    steps: dict[str, Callable[[], object]] = {
        "bits": lambda: checks.bits(subject, expected),
        "collectives": lambda: checks.collectives(subject),
        "local read ms": lambda: checks.read_time(subject),
        "clip ms": lambda: checks.clip_time(subject, active=False),
        "torch ms": lambda: checks.torch_time(subject, active=False),
        "host ms": lambda: checks.host_time(subject),
        "extra KiB": lambda: checks.extra_memory(subject),
        "NaN": lambda: checks.nan_on_one_rank(subject),
        "graph": lambda: checks.capture(subject),
        "active ms": lambda: checks.clip_time(subject, active=True),
        "torch active ms": lambda: checks.torch_time(subject, active=True),
    }
    for column, step in steps.items():
        row[column] = _limited(step)
    return row


def _offloaded(device: torch.device, cpu: bool) -> Row:
    """Gradients on the CPU, a group of the device."""
    subject, expected = _limited(lambda: _subject(model.offloaded, device, cpu))
    return {
        "layout": "FSDP2, offloaded",
        "bits": _limited(lambda: checks.bits(subject, expected)),
        "NaN": _limited(lambda: checks.nan_on_one_rank(subject)),
        "clip ms": _limited(lambda: checks.clip_time(subject, active=False)),
    }


def _subject(
    layout: Callable[[model.Decoder, str, int], None], device: torch.device, cpu: bool
) -> tuple[checks.Subject, float]:
    """The sharded model, and the exact norm of its whole gradients on this device alone."""
    gc.collect()
    made = model.decoder(model.SMALL if cpu else model.LARGE, device)
    whole = [parameter.detach() for parameter in made.parameters()]
    expected = gradclip.get_total_norm(whole, dtype=torch.float64).item()
    del whole
    layout(made, device.type, dist.get_world_size())
    return checks.Subject(model.with_gradients(made), device), expected


def _limited(step: Callable[[], Any]) -> Any:
    """Run a step; end this process, and so all of torchrun's, when it takes too long."""

    def end() -> None:
        faulthandler.dump_traceback()
        os._exit(1)

    timer = threading.Timer(LIMIT_SECONDS, end)
    timer.start()
    try:
        return step()
    finally:
        timer.cancel()


def _is_bad(value: object) -> bool:
    return isinstance(value, str) and value.startswith(("DIFFER", "FAILS"))


def _table(rows: list[Row]) -> str:
    columns = list(rows[0])
    cells = [columns] + [[_cell(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
    return "\n".join(lines)


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _machine(device: torch.device) -> Row:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "device": name,
        "ranks": dist.get_world_size(),
        "torch": torch.__version__,
        "gradclip": gradclip.__version__,
    }


if __name__ == "__main__":
    main()
