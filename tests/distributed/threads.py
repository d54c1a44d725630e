"""A world of ranks that are threads of this process, over torch's threaded process group.

A scene takes milliseconds, so thousands of them can be tried; a scene that hangs fails after a
limit. Ranks keep their meshes between scenes.
"""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

#: Seconds after which a scene counts as hung.
LIMIT = 20.0


class HangError(AssertionError):
    """Some ranks did not answer."""


class ThreadWorld:
    """`size` ranks; a context manager. `setup(rank)` makes what a rank keeps between scenes."""

    def __init__(self, size: int, setup: Callable[[int], Any]) -> None:
        self.size = size
        self.setup = setup
        self.tasks: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(size)]
        self.answers: queue.SimpleQueue[tuple[int, bool, Any]] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []

    def __enter__(self) -> ThreadWorld:
        isolate: Any = torch._C._distributed_c10d
        isolate._set_thread_isolation_mode(True)
        multi_threaded_pg._install_threaded_pg()
        multi_threaded_pg.ProcessLocalGroup.reset()
        store: Any = torch._C._distributed_c10d.HashStore()
        for rank in range(self.size):
            thread = threading.Thread(target=self._serve, args=(rank, store), daemon=True)
            thread.start()
            self.threads.append(thread)
        self._collect()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self.tasks:
            task.put(None)
        for thread in self.threads:
            thread.join(2.0)
        multi_threaded_pg._uninstall_threaded_pg()
        isolate: Any = torch._C._distributed_c10d
        isolate._set_thread_isolation_mode(False)

    def run(self, scene: Callable[[int, Any], Any]) -> list[Any]:
        """What `scene(rank, kept)` gives on each rank."""
        for task in self.tasks:
            task.put(scene)
        return self._collect()

    def _collect(self) -> list[Any]:
        results: list[Any] = [None] * self.size
        failures: list[tuple[int, Any]] = []
        for _ in range(self.size):
            try:
                rank, good, result = self.answers.get(timeout=LIMIT)
            except queue.Empty:
                raise HangError(self._waiting(results, failures)) from None
            results[rank] = result
            if not good:
                failures.append((rank, result))
        if failures:
            raise failures[0][1]
        return results

    def _waiting(self, results: list[Any], failures: list[tuple[int, Any]]) -> str:
        """Where the ranks that gave no answer are, and what the others answered."""
        frames = sys._current_frames()
        lines = [f"answers: {results}, failures: {failures}"]
        for thread in self.threads:
            frame = frames.get(thread.ident or 0)
            lines += traceback.format_stack(frame)[-9:] if frame else []
        return "\n".join(lines)

    def _serve(self, rank: int, store: Any) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=self.size, store=store)
            kept = self.setup(rank)
            self.answers.put((rank, True, None))
        except BaseException as error:
            self.answers.put((rank, False, error))
            return
        while (scene := self.tasks[rank].get()) is not None:
            try:
                self.answers.put((rank, True, scene(rank, kept)))
            except BaseException as error:
                self.answers.put((rank, False, error))
        dist.destroy_process_group()
