"""The clip over ranks beside torch's, on gloo processes of this machine: a table and JSON.

Run as `python -m benches.sharded` (`--ranks`, `--parameters`). Times are rank 0's; all ranks share
this machine's cores, so the wait inside the all-reduce, shown apart, is mostly the other ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import gradclip
from benches import machine

RESULTS = Path(__file__).parent / "results" / "sharded.json"
CALLS = 30
TORCH_CALLS = 8
CHANGES = 3
LIMIT = 1e9  # nothing to clip: the time of deciding so

Row = dict[str, Any]


def main() -> None:
    """Run the benchmark and show it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="gloo processes, an even number")
    parser.add_argument("--parameters", type=int, default=1000, help="DTensor parameters, 4x4 each")
    asked = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    answers: Any = context.SimpleQueue()
    store = str(Path(tempfile.mkdtemp()) / "store")
    ranks = [
        context.Process(target=_serve, args=(rank, asked.ranks, asked.parameters, store, answers))
        for rank in range(asked.ranks)
    ]
    for process in ranks:
        process.start()
    rows: list[Row] = answers.get()
    for process in ranks:
        process.join()
    _show(rows, asked.ranks)
    result = {"machine": machine.description(), "ranks": asked.ranks, "rows": rows}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _serve(rank: int, size: int, count: int, store: str, answers: Any) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    line = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    both = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    rows = [
        *host_time(f"{count} shards", _parameters(count, line, Shard(0))),
        *host_time(f"{count} copies of shards", _parameters(count, both, Replicate(), Shard(0))),
        reading(both),
    ]
    if rank == 0:
        answers.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def _parameters(count: int, mesh: DeviceMesh, *where: Placement) -> list[torch.nn.Parameter]:
    made = []
    for _ in range(count):
        owner = torch.nn.Parameter(_placed(torch.zeros(4, 4), mesh, *where))
        owner.grad = _placed(torch.ones(4, 4), mesh, *where)
        made.append(owner)
    return made


def _placed(local: torch.Tensor, mesh: DeviceMesh, *where: Placement) -> DTensor:
    return DTensor.from_local(local, mesh, list(where), run_check=False)


def host_time(what: str, owners: list[torch.nn.Parameter]) -> list[Row]:
    """First calls, later calls, and calls after the set of gradients changed, of both."""
    clippers: dict[str, tuple[int, Callable[[], Any]]] = {
        "gradclip.Clipper": (CALLS, gradclip.Clipper(owners, LIMIT).clip_),
        "gradclip.clip_": (CALLS, lambda: gradclip.clip_(owners, LIMIT)),
        "torch": (TORCH_CALLS, lambda: torch.nn.utils.clip_grad_norm_(owners, LIMIT)),
    }
    rows = []
    for name, (calls, clip) in clippers.items():
        first, _ = _timed(clip)
        later = [_timed(clip) for _ in range(calls)]
        changed = [_timed(clip) for _ in _changing(owners)]
        row = {"what": what, "of": name, "first_ms": first, **_medians("later", later)}
        rows.append(row | _medians("changed", changed))
    return rows


def _medians(name: str, timed: list[tuple[float, float]]) -> Row:
    """Medians of whole calls, and outside of all_reduce (torch's collectives go another way)."""
    outside = [total - wait for total, wait in timed] if any(w for _, w in timed) else [math.nan]
    return {
        f"{name}_ms": statistics.median(total for total, _ in timed),
        f"{name}_without_collective_ms": statistics.median(outside),
    }


def _changing(owners: list[torch.nn.Parameter]) -> Any:
    """Take away more gradients each time, on all ranks: experts that no token reached."""
    kept = [owner.grad for owner in owners]
    for step in range(CHANGES):
        for owner in owners[: len(owners) // 20 * (step + 1)]:
            owner.grad = None
        yield step
    for owner, gradient in zip(owners, kept, strict=True):
        owner.grad = gradient


def _timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds of a call that all ranks start together, and of its wait in all_reduce."""
    waits: list[float] = []
    original = dist.all_reduce

    def all_reduce(*arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        result = original(*arguments, **named)
        waits.append(time.perf_counter() - start)
        return result

    dist.barrier()
    dist.all_reduce = all_reduce
    try:
        start = time.perf_counter()
        call()
        total = time.perf_counter() - start
    finally:
        dist.all_reduce = original
    return total * 1e3, sum(waits) * 1e3


def reading(both: DeviceMesh) -> Row:
    """What a rank reads of replicated gradients, and the time of that against reading all."""
    owners = []
    for _ in range(4):
        owner = torch.nn.Parameter(_placed(torch.zeros(1 << 22), both, Replicate(), Shard(0)))
        owner.grad = _placed(torch.ones(1 << 22), both, Replicate(), Shard(0))
        owners.append(owner)
    gradients: list[Any] = [owner.grad for owner in owners]
    shares = gradclip.explain(owners).shares
    read = sum(_length(share.counted) for share in shares)
    clipper = gradclip.Clipper(owners, LIMIT)
    clipper.clip_()
    local = [gradient.to_local() for gradient in gradients]
    ours = [_timed(clipper.clip_) for _ in range(CALLS)]
    whole = [_timed(lambda: gradclip.get_total_norm(local))[0] for _ in range(CALLS)]
    return {
        "what": "64 MiB held twice",
        "of": "gradclip.Clipper",
        "read_fraction": read / sum(tensor.numel() for tensor in local),
        "later_without_collective_ms": statistics.median(t - wait for t, wait in ours),
        "whole_local_read_ms": statistics.median(whole),
    }


def _length(counted: str) -> int:
    start, stop = counted.split(" ")[0].split(":")
    return int(stop) - int(start)


def _show(rows: list[Row], ranks: int) -> None:
    table = Table(title=f"One clip over {ranks} gloo ranks, ms on rank 0", box=SIMPLE_HEAD)
    columns = ["first", "later", "… outside the collective", "set changed", "… outside it"]
    for column in ("gradients", "of", *columns):
        table.add_column(column, justify="left" if column in ("gradients", "of") else "right")
    fields = ("first", "later", "later_without_collective", "changed", "changed_without_collective")
    for row in rows[:-1]:
        table.add_row(row["what"], row["of"], *(f"{row[f'{field}_ms']:.2f}" for field in fields))
    console = Console(width=120)
    console.print(table)
    last = rows[-1]
    console.print(
        f"{last['what']}: a rank reads {last['read_fraction']:.0%} of what it holds, in"
        f" {last['later_without_collective_ms']:.2f} ms; reading all of it takes"
        f" {last['whole_local_read_ms']:.2f} ms"
    )


if __name__ == "__main__":
    main()
