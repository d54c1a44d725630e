"""A process may exit at any moment after a clip over ranks, whatever is still alive."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

#: The interpreter's lock changes hands late, so that the exit comes before a worker thread's turn.
SETUP = """
import sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
import gradclip

sys.setswitchinterval(30)
store, rank = "file://" + sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
plain = torch.nn.Parameter(torch.zeros(3))
plain.grad = torch.ones(3)
"""

CASES = {
    "destroyed": """
gradclip.clip_([plain], 1.0, group=dist.group.WORLD, plain="distinct")
dist.destroy_process_group()
""",
    "not destroyed": """
gradclip.clip_([plain], 1.0, group=dist.group.WORLD, plain="distinct")
""",
    "dtensor": """
line = init_device_mesh("cpu", (2,))
owner = torch.nn.Parameter(DTensor.from_local(plain.detach(), line, [Shard(0)]))
owner.grad = DTensor.from_local(plain.grad, line, [Shard(0)])
gradclip.clip_([owner], 1.0)
dist.destroy_process_group()
""",
    "clipper": """
clipper = gradclip.Clipper([plain], 1.0, group=dist.group.WORLD, plain="distinct")
clipper.clip_()
dist.destroy_process_group()
""",
    "the group is let go": """
import weakref
from gradclip.sharding import transport
group = weakref.ref(dist.group.WORLD)
way = transport.over_group(group())
gradclip.clip_([plain], 1.0, group=group(), plain="distinct")
dist.destroy_process_group()
assert group() is None
try:
    way.sum_(torch.ones(1, dtype=torch.int64))
except RuntimeError as error:
    assert "the process group was destroyed; make a new Clipper" in str(error)
""",
}


def ranks_of(case: str, store: Path) -> list[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SETUP + CASES[case], str(store)]
    return [
        subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]


@pytest.mark.parametrize("case", CASES)
def test_the_exit_after_a_clip(case: str, tmp_path: Path) -> None:
    ranks = ranks_of(case, tmp_path / "store")
    told = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
