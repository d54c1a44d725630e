"""What launches share between calls and threads, tried without a device."""

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from gradclip import work

CPU = torch.device("cpu")
STREAM = work.Stream(CPU, 7, is_captured=False)
OTHER = work.Stream(CPU, 8, is_captured=False)
CAPTURED = work.Stream(CPU, 7, is_captured=True)


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_idle", {})
    monkeypatch.setattr(work, "_tables", {})


def test_a_workspace_is_used_again_and_by_one_at_a_time() -> None:
    with work.workspace(STREAM) as first, work.workspace(STREAM) as second:
        assert first is not second
    with work.workspace(OTHER) as other, work.workspace(STREAM) as again:
        assert again in (first, second)
        assert other not in (first, second)


def test_a_captured_graph_has_a_workspace_of_its_own() -> None:
    with work.workspace(STREAM) as ordinary:
        pass
    with work.workspace(CAPTURED) as first:
        assert first is not ordinary
    with work.workspace(CAPTURED) as second:
        assert second not in (first, ordinary)


def test_a_list_that_a_graph_uploads_is_no_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "Table", Table)
    listed: Any = Listed(3)
    captured = work.table_of(listed, CAPTURED)
    ordinary = work.table_of(listed, STREAM)
    assert captured is not ordinary
    assert work.table_of(listed, CAPTURED) is ordinary


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_what_a_failure_left_in_a_workspace_reaches_no_other(error: type[BaseException]) -> None:
    def fail() -> None:
        with work.workspace(STREAM) as space:
            space.stripes.fill_(1)
            raise error

    with pytest.raises(error):
        fail()
    with work.workspace(STREAM) as space:
        assert not space.stripes.any()


class Listed:
    """A work list, told apart by a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def same_as(self, other: "Listed") -> bool:
        return self.number == other.number


class Table:
    """A work list that is uploaded nowhere."""

    def __init__(self, listed: Listed, stream: work.Stream) -> None:
        self.listed = listed


def test_threads_find_the_tables_of_their_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "Table", Table)

    def finds(seed: int) -> bool:
        numbers = random.Random(seed).choices(range(40), k=3000)
        tables: list[Any] = [work.table_of(Listed(k), STREAM) for k in numbers]  # type: ignore[arg-type]
        return [table.listed.number for table in tables] == numbers

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(finds, range(6)))
    finally:
        sys.setswitchinterval(interval)
    assert len(work._tables[CPU]) == work._KEPT_TABLES
