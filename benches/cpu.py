"""gradclip beside torch on the CPU, in one process: a table on the screen and JSON in results."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benches import ceilings, machine
from benches.cases import Case, all_cases
from benches.timing import SECONDS, Timing, in_turns

RESULTS = Path(__file__).parent / "results"
WIDTH = 120  # columns, where no terminal says how many it has


@dataclass(frozen=True)
class Result:
    """The timings of one case."""

    name: str
    gradient_bytes: int
    gradclip: Timing
    torch: Timing
    read: Timing

    @property
    def ratio(self) -> float:
        """How many times gradclip's time torch takes, by the medians."""
        return self.torch.median / self.gradclip.median

    @property
    def ratio_of_fastest(self) -> float:
        """The same by the fastest rounds."""
        return self.torch.fastest / self.gradclip.fastest

    @property
    def share_of_read(self) -> float:
        """The time of a pure read of as many bytes, by gradclip's; above 1 from a cache."""
        return self.read.median / self.gradclip.median

    @property
    def bytes_per_second(self) -> float:
        """Gradient bytes, counted once, by gradclip's median time."""
        return self.gradient_bytes / self.gradclip.median


def main() -> None:
    """Measure every case whose name holds the words given, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time for each case")
    arguments = parser.parse_args()

    console = Console(width=None if Console().is_terminal else WIDTH)
    about = machine.description()
    console.print(*(f"{key}: {value}" for key, value in about.items()), sep="\n")
    bandwidths = ceilings.bandwidths()
    results = []
    for result in _measure(arguments.only, arguments.seconds):
        results.append(result)
        console.print(f"{result.name}: {result.ratio:.2f} times as fast as torch")
    console.print(_table(results, bandwidths))
    console.print(f"written to {_write(about, bandwidths, results).relative_to(machine.ROOT)}")


def _measure(only: str, seconds: float) -> Iterator[Result]:
    for case in all_cases():
        if only in case.name:
            yield _result(case, seconds)


def _result(case: Case, seconds: float) -> Result:
    """A case's timings, with a pure read of as many bytes in the same rounds."""
    timings = in_turns({**case.calls, "read": ceilings.read_of(case.gradient_bytes)}, seconds)
    return Result(case.name, case.gradient_bytes, **timings)


def _table(results: list[Result], bandwidths: dict[str, float]) -> Table:
    caption = ", ".join(f"{name} {speed / 1e9:.1f} GB/s" for name, speed in bandwidths.items())
    table = Table(box=SIMPLE_HEAD, caption=f"this machine's memory: {caption}")
    table.add_column("case", no_wrap=True)
    for heading in ("gradclip ms", "torch ms", "ratio", "of fastest", "GB/s", "of read"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            result.name,
            f"{1e3 * result.gradclip.median:.3f}",
            f"{1e3 * result.torch.median:.3f}",
            f"{result.ratio:.2f}",
            f"{result.ratio_of_fastest:.2f}",
            f"{result.bytes_per_second / 1e9:.1f}",
            f"{result.share_of_read:.0%}",
        )
    return table


def _write(
    about: dict[str, str | int], bandwidths: dict[str, float], results: list[Result]
) -> Path:
    """One file a run, named by its date."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"cpu-{str(about['date']).replace(':', '')}.json"
    rows = [{**asdict(result), "ratio": result.ratio} for result in results]
    path.write_text(json.dumps({"about": about, "bytes_per_second": bandwidths, "cases": rows}))
    return path


if __name__ == "__main__":
    main()
