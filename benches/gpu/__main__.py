"""The suite in one command: a table and JSON. `python -m benches.gpu [--quick] [--out FOLDER]`."""

import argparse
import gc
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import gradclip
from benches.gpu import lists, measure
from benches.machine import description

BFLOAT, HALF, FLOAT, DOUBLE = torch.bfloat16, torch.float16, torch.float32, torch.float64
NOTHING_TO_CLIP = 1e30
SHRINK = 0.9
Row = dict[str, Any]


def shrinking(params: list[nn.Parameter]) -> Callable[[], float]:
    """Limits that fall with every call by more than rounding: there is always something to clip."""
    norm = float(gradclip.get_total_norm(lists.gradients(params)))

    def limit() -> float:
        nonlocal norm
        norm *= SHRINK
        return norm

    return limit


def compared(name: str, params: list[nn.Parameter]) -> Row:
    """Whole clips of gradclip and torch, on the device and in all."""
    active = shrinking(params)
    ours, theirs = gradclip.clip_, torch.nn.utils.clip_grad_norm_
    calls: dict[str, measure.Call] = {
        "gradclip, nothing to clip": lambda: ours(params, NOTHING_TO_CLIP),
        "torch, nothing to clip": lambda: theirs(params, NOTHING_TO_CLIP),
        "gradclip, active": lambda: ours(params, active()),
        "torch, active": lambda: theirs(params, active()),
        "gradclip, norm": lambda: gradclip.get_total_norm(lists.gradients(params)),
    }
    elements = sum(p.numel() for p in params)
    row: Row = {"list": name, "tensors": len(params), "elements": elements}
    row["device_ms"], row["wall_ms"] = measure.device_ms_of(calls), measure.wall_ms_of(calls)
    first = calls["gradclip, nothing to clip"]
    row["host_us"] = {
        "gradclip": measure.host_us(first),
        "gradclip, after a wait": measure.first_host_us(first),
        "torch": measure.first_host_us(calls["torch, nothing to clip"]),
        "reading .grad alone": measure.host_us(lambda: [p.grad for p in params]),
    }
    row["extra_bytes"] = measure.extra_bytes(first)
    if len(params) <= 800:
        loop = lambda: theirs(params, NOTHING_TO_CLIP, foreach=False)  # noqa: E731
        row["device_ms"]["torch, tensor by tensor"] = measure.device_ms(loop, 3)
    return row


def passes(name: str, params: list[nn.Parameter]) -> Row:
    """One pass for each norm type, beside a copy and the plain float64 pass at its best.

    Several calls of each follow one another: in turns with others the plain pass loses 2%.
    """
    from benches.gpu.plain import plain_pass  # needs Triton

    tensors = lists.gradients(params)
    bytes_read = sum(t.nbytes for t in tensors)
    lists.fill(params, "gaussian")
    plain = [plain_pass(tensors, programs) for programs in (16, 32)]
    orders = (2.0, 1.0, math.inf, -math.inf, 0.0) + (() if tensors[0].dtype == DOUBLE else (3.0,))
    norms = {f"p = {p:g}": _total(tensors, p) for p in orders}
    row: Row = {"list": name, "bytes": bytes_read, "ms": {}}
    row["ms"]["plain"] = min(map(measure.device_ms, plain))
    row["ms"]["copy"] = measure.device_ms(_copy(tensors[0].device))
    for order, call in norms.items():
        row["ms"][order] = measure.device_ms(call)
    for how in ("zero rows", "heavy tails"):
        if tensors[0].dtype in (BFLOAT, FLOAT):
            lists.fill(params, how)
            row["ms"][how] = measure.device_ms(_total(tensors, 2.0))
    lists.fill(params, "gaussian")
    return row


def _total(tensors: list[torch.Tensor], p: float) -> measure.Call:
    return lambda: gradclip.get_total_norm(tensors, p)


def _copy(device: torch.device) -> measure.Call:
    """A copy of 4 GiB, read and written."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def run(quick: bool) -> list[Row]:
    """All lists, one in memory at a time; launches last, as the profiler slows all that follow."""
    cases = [Case("740 mixed sizes", [dtype]) for dtype in (BFLOAT, FLOAT, HALF, DOUBLE)]
    for name in ("5,000 x 1,000", "MoE share", "Llama-3-8B", "GPT-2 small", "2^31 + 8"):
        if not quick or name in ("5,000 x 1,000", "MoE share"):
            cases.append(Case(name, [BFLOAT]))
    cases.append(Case("740 mixed sizes", [BFLOAT, FLOAT]))
    rows = [show(_row(case)) for case in cases]
    for case, row in zip(cases, rows, strict=True):
        with _parameters(case) as params:
            row["launches"] = measure.launches(partial(gradclip.clip_, params, NOTHING_TO_CLIP))
    return rows


class Case(NamedTuple):
    """A list by the name of its shapes; element types take turns."""

    shapes: str
    dtypes: list[torch.dtype]

    @property
    def name(self) -> str:
        """How tables call it."""
        return f"{self.shapes}, {'+'.join(str(d).removeprefix('torch.') for d in self.dtypes)}"


@contextmanager
def _parameters(case: Case) -> Iterator[list[nn.Parameter]]:
    params = lists.parameters(lists.SHAPES[case.shapes](), case.dtypes)
    yield params
    params.clear()
    gc.collect()
    torch.cuda.empty_cache()


def _row(case: Case) -> Row:
    with _parameters(case) as params:
        row = compared(case.name, params)
        if case.shapes == "740 mixed sizes" and len(case.dtypes) == 1:
            row["passes"] = passes(case.name, params)
    return row


def show(row: Row) -> Row:
    """Prints a line of the table, and one for the passes."""
    device, wall = row["device_ms"], row["wall_ms"]
    quiet, busy = "nothing to clip", "active"
    print(
        f"| {row['list']} | {device[f'gradclip, {quiet}']:.3f} | {device[f'torch, {quiet}']:.3f} "
        f"| {device[f'torch, {quiet}'] / device[f'gradclip, {quiet}']:.2f} "
        f"| {device[f'gradclip, {busy}']:.3f} | {device[f'torch, {busy}']:.3f} "
        f"| {device[f'torch, {busy}'] / device[f'gradclip, {busy}']:.2f} "
        f"| {wall[f'gradclip, {quiet}']:.3f} | {wall[f'torch, {quiet}']:.3f} "
        f"| {wall[f'torch, {quiet}'] / wall[f'gradclip, {quiet}']:.1f} "
        f"| {row['host_us']['gradclip']:.0f} | {row['host_us']['gradclip, after a wait']:.0f} "
        f"| {row['host_us']['reading .grad alone']:.0f} | {row['host_us']['torch']:.0f} "
        f"| {row['extra_bytes'] / 2**20:.2f} |",
        flush=True,
    )
    if "passes" in row:
        times = row["passes"]["ms"]
        exact = times["p = 2"]
        rates = {k: f"{t:.3f} ms, {times['plain'] / t:.3f} of plain" for k, t in times.items()}
        slower = {
            k: f"{times[k] / exact:.2f} x" for k in ("zero rows", "heavy tails") if k in times
        }
        print("  passes:", {**rates, **slower}, flush=True)
    return row


def main() -> None:
    """Measures, prints, and writes JSON."""
    parser = argparse.ArgumentParser("python -m benches.gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the lists with a target")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "no CUDA device: the suite runs on a machine with one\n")
    machine = {**description(), "device": torch.cuda.get_device_name()}
    print(machine)
    print(
        "| list | device ms: gradclip, nothing to clip | torch | ratio | active: gradclip | torch "
        "| ratio | wall ms: gradclip | torch | ratio | host us: gradclip | after a wait "
        "| .grad alone | torch | extra MiB |\n" + "|---" * 15 + "|"
    )
    rows = run(options.quick)
    print("launches:", {row["list"]: row["launches"] for row in rows})
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"gpu-{machine['date']}.json".replace(":", "")
    (options.out / name).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
    print("written:", os.fspath(options.out / name))


if __name__ == "__main__":
    main()
