"""What holds for every test: seeds, threads, memory that is poison until it is written."""

import pathlib
from collections.abc import Iterator

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    max_examples=150,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)


@pytest.fixture(autouse=True)
def _poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """In deterministic mode torch fills new memory with NaN: reading it before writing shows.

    Only for the tests beside this file: on GPUs the mode refuses operations that tests need.
    """
    torch.use_deterministic_algorithms(request.path.parent == pathlib.Path(__file__).parent)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["fused", "reference"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test through the engine, and again through the reference path."""
    name: str = request.param
    monkeypatch.setenv("GRADCLIP_FUSED", "1" if name == "fused" else "0")
    return name
