"""Worlds of gloo processes, one of each size, shared by all tests of the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.world import World


@pytest.fixture(scope="session")
def two() -> Iterator[World]:
    with World(2) as world:
        yield world


@pytest.fixture(scope="session")
def three() -> Iterator[World]:
    with World(3) as world:
        yield world


@pytest.fixture(scope="session")
def four() -> Iterator[World]:
    with World(4) as world:
        yield world


@pytest.fixture(scope="session")
def eight() -> Iterator[World]:
    with World(8) as world:
        yield world
