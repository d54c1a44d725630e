"""What launches share between calls and threads, tried without a device."""

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from gradclip import work

CPU = torch.device("cpu")
STREAM = 7


@pytest.fixture(autouse=True)
def _nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(work, "_idle", {})
    monkeypatch.setattr(work, "_tables", {})


def test_a_workspace_is_used_again_and_by_one_at_a_time() -> None:
    with work.workspace(CPU, STREAM) as first, work.workspace(CPU, STREAM) as second:
        assert first is not second
    with work.workspace(CPU, STREAM + 1) as other, work.workspace(CPU, STREAM) as again:
        assert again in (first, second)
        assert other not in (first, second)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_what_a_failure_left_in_a_workspace_reaches_no_other(error: type[BaseException]) -> None:
    def fail() -> None:
        with work.workspace(CPU, STREAM) as space:
            space.stripes.fill_(1)
            raise error

    with pytest.raises(error):
        fail()
    with work.workspace(CPU, STREAM) as space:
        assert not space.stripes.any()


class Listed:
    """A work list, told apart by a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def same_as(self, other: "Listed") -> bool:
        return self.number == other.number


class Table:
    """A work list that is uploaded nowhere."""

    captured = False

    def __init__(self, device: torch.device, listed: Listed) -> None:
        self.listed = listed

    def use(self, device: torch.device) -> None:
        pass


def test_threads_find_the_tables_of_their_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "Table", Table)

    def finds(seed: int) -> bool:
        numbers = random.Random(seed).choices(range(40), k=3000)
        tables: list[Any] = [work.table_of(CPU, Listed(k)) for k in numbers]  # type: ignore[arg-type]
        return [table.listed.number for table in tables] == numbers

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(finds, range(6)))
    finally:
        sys.setswitchinterval(interval)
    assert len(work._tables[CPU]) == work._KEPT_TABLES
