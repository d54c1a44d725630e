"""The command line: `python -m gradclip kernels` lists the kernel images of this installation."""

import argparse
import sys
from collections.abc import Sequence

from gradclip import images

NONE = (
    "no kernel images in this installation: CUDA gradients need an installed Triton, or take the "
    "reference path; `pip install .` on Linux brings them (without `-C images=no`), and in a "
    "checkout `python -m kernels.ahead_of_time` makes them"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = argparse.ArgumentParser("python -m gradclip", description="Exact gradient clipping.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    kernels = commands.add_parser("kernels", help="list the compiled CUDA kernels")
    kernels.set_defaults(run=_list_kernels)
    options = parser.parse_args(arguments)
    if "run" not in options:
        parser.print_help()
        return 0
    try:
        print(options.run())
    except images.ImageError as error:
        print(f"gradclip: {error}", file=sys.stderr)
        return 1
    return 0


def _list_kernels() -> str:
    """A table of all images, and which devices they serve."""
    manifest = images.installed()
    if manifest is None:
        return NONE
    lines = [("entry", "image", "bytes", "registers", "shared", "threads", "source")]
    lines += [
        (
            row.entry,
            f"sm_{row.architecture}",
            str(row.size),
            str(row.registers),
            str(row.shared),
            str(row.threads),
            row.source[:12],
        )
        for row in images.rows()
    ]
    serves = ", ".join(f"sm_{architecture}" for architecture in images.architectures())
    return f"{_table(lines)}\n\nfor {serves}; by Triton {manifest.triton}"


def _table(lines: Sequence[Sequence[str]]) -> str:
    """Columns side by side: names to the left, numbers to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if 2 <= place <= 5 else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


if __name__ == "__main__":
    sys.exit(main())
