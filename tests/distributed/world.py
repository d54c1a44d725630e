"""A world of real gloo processes that stays up between tests; a hang is a failure.

The processes come from a fork server that has imported torch once, so a world of eight costs about
a second. Tests send module-level functions; each rank runs them and answers with its result.
"""

from __future__ import annotations

import datetime
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

#: Seconds after which a case counts as hung; gloo itself gives up a little earlier.
CASE_LIMIT = 40.0
GLOO_LIMIT = datetime.timedelta(seconds=25)

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed.tensor", "torch.distributed.fsdp", "gradclip"])


class World:
    """`size` ranks; a context manager."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks: list[tuple[Any, Connection]] = []

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def run(self, case: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `case(rank, *arguments)` gives on each rank, or an assertion with every failure."""
        if not self.ranks:
            self.start()
        for _, pipe in self.ranks:
            pipe.send((case, arguments))
        answers = [self._answer(rank, pipe) for rank, (_, pipe) in enumerate(self.ranks)]
        failures = [f"rank {rank}: {told}" for rank, (told, _) in enumerate(answers) if told]
        if failures:
            self.stop()
        assert not failures, "\n".join(failures)
        return [result for _, result in answers]

    def _answer(self, rank: int, pipe: Connection) -> tuple[str | None, Any]:
        if not pipe.poll(CASE_LIMIT):
            return f"no answer after {CASE_LIMIT} s", None
        try:
            told, result = pipe.recv()
        except EOFError:
            return "the process died", None
        return told, result

    def start(self) -> None:
        """Start the processes."""
        store = Path(tempfile.mkdtemp()) / "store"
        for rank in range(self.size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_serve, args=(rank, self.size, str(store), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.ranks.append((process, ours))

    def stop(self) -> None:
        """End the processes, by force where they do not listen."""
        for process, pipe in self.ranks:
            pipe.close()
            process.join(0.5)
            process.kill()
            process.join()
        self.ranks = []


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=GLOO_LIMIT
    )
    while True:
        try:
            case, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((None, case(rank, *arguments)))
        except BaseException:
            pipe.send((traceback.format_exc(limit=-6), None))
