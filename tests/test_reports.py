"""Every public report of a clipping bug that this project gathered, as a test.

The cases of several ranks are in `tests/distributed`. Left out: `tensorflow/tensorflow#21363` (an
infinite gradient should make every gradient NaN): gradclip follows torch, whose coefficient is 0;
and `pytorch/pytorch#133586`, a ratio of times: `make bench` measures it (many small tensors).
"""

import functools
import json
import os
import pathlib
import sys
import unittest
import warnings
from subprocess import run
from typing import Any

import pytest
import torch

import gradclip
from tests import prelude

DATA = pathlib.Path(__file__).parent / "data" / "reports.jsonl"
LEFT_OUT = {"tensorflow/tensorflow#21363", "pytorch/pytorch#133586"}
WITHOUT_EPS = {"goodfire-ai/spd#643"}
"""Want the mathematical coefficient, which torch's 1e-6 in the denominator is not."""

OWN_WARNINGS = {"fla-org/flame#20"}
"""Want a warning where torch's functions are silent, as those of torch's names are here."""

OWN_PROCESS = {"pytorch/pytorch#148532", "NVIDIA/Megatron-LM#3669"}
"""Leave a process group behind."""

LARGE = {"pytorch/pytorch#169930"}
BYTES_FOR_LARGE = 7 << 30

Case = dict[str, Any]


def cases() -> list[Any]:
    lines = DATA.read_text(encoding="utf-8").splitlines()
    wanted = [case for case in map(json.loads, lines) if case["ranks"] == 1]
    return [
        pytest.param(case, id=case["id"], marks=marks_of(case))
        for case in wanted
        if case["id"] not in LEFT_OUT
    ]


def marks_of(case: Case) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.gpu] if "need_cuda()" in case["snippet"] else []
    return [*marks, pytest.mark.large] if case["id"] in LARGE else marks


@pytest.mark.parametrize("case", cases())
def test_report(case: Case) -> None:
    if case["id"] in LARGE and available_bytes() < BYTES_FOR_LARGE:
        pytest.skip(f"needs {BYTES_FOR_LARGE >> 30} GiB of free memory")
    if case["id"] in OWN_PROCESS:
        run_in_own_process(case)
        return
    try:
        run_here(case)
    except unittest.SkipTest as skip:
        pytest.skip(str(skip))


def run_here(case: Case) -> None:
    clip: Any = gradclip.clip_ if case["id"] in OWN_WARNINGS else gradclip.clip_grad_norm_
    if case["id"] in WITHOUT_EPS:
        clip = functools.partial(gradclip.clip_, eps=0.0)
    names = {
        "clip_": clip,
        "norm_": gradclip.get_total_norm,
        "scale_": gradclip.clip_grads_with_norm_,
        "value_": gradclip.clip_grad_value_,
    }
    torch.use_deterministic_algorithms(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(case["snippet"], case["id"], "exec"), {**prelude.NAMES, **names})


def run_in_own_process(case: Case) -> None:
    if "need_cuda()" in case["snippet"] and not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    script = f"import tests.test_reports as t\nt.run_here({case!r})"
    root = pathlib.Path(__file__).parent.parent
    done = run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def available_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_every_report_is_told_apart() -> None:
    lines = DATA.read_text(encoding="utf-8").splitlines()
    names = [json.loads(line)["id"] for line in lines]
    assert len(names) == len(set(names)) == 94
    special = LEFT_OUT | OWN_WARNINGS | WITHOUT_EPS | OWN_PROCESS | LARGE
    assert special.issubset(names)
