"""The public reports that need several ranks, run in the worlds that stay up between tests."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

import gradclip
from tests import prelude
from tests.distributed.world import World

pytestmark = pytest.mark.distributed

DATA = pathlib.Path(__file__).parent.parent / "data" / "reports.jsonl"


def reports() -> list[Any]:
    found = map(json.loads, DATA.read_text(encoding="utf-8").splitlines())
    return [pytest.param(case, id=case["id"]) for case in found if case["ranks"] != 1]


def run_body(rank: int, program: str) -> None:
    """Run the snippet's `body` here; its last line, left out, would start processes."""
    names: dict[str, Any] = {
        **prelude.NAMES,
        "clip_": gradclip.clip_grad_norm_,
        "norm_": gradclip.get_total_norm,
        "scale_": gradclip.clip_grads_with_norm_,
        "value_": gradclip.clip_grad_value_,
    }
    exec(program, names)
    names["body"](rank)


def test_every_report_is_here() -> None:
    assert len(reports()) == 19


@pytest.mark.parametrize("case", reports())
def test_report(case: dict[str, Any], two: World, four: World) -> None:
    program, start = case["snippet"].rstrip().rsplit("\n", 1)
    worlds = {"ranks(2, body)": two, "ranks(2, body, 120)": two, "ranks(4, body)": four}
    worlds[start].run(run_body, program)
