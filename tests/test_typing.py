"""The annotations accept what works, and refuse what does not, under strict mypy."""

import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("mypy", reason="mypy is not installed")

ROOT = pathlib.Path(__file__).parent.parent

#: Calls; `# E` marks those that must be refused.
CALLS = """
import math
import torch
from torch import nn
import torch.distributed as dist
import gradclip

model = nn.Linear(2, 2)
group: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))


def reduce(vector: torch.Tensor, operation: str) -> None: ...
def rule(name: str | None, owner: torch.Tensor) -> list[int] | None: ...


clipper = gradclip.Clipper(model, 1.0)
gradclip.Clipper(model.parameters(), torch.tensor(1.0), "inf")
gradclip.Clipper(model.named_parameters(), 1, 2, group=group, plain="replicated")
gradclip.Clipper([model.weight], math.inf, plain=[0, 1], replicas={"w": "elsewhere"})
gradclip.Clipper(model, 1.0, plain=range(2), replicas={model.weight: [0]}, check_replicas=4)
gradclip.Clipper(model, 1.0, plain=mesh, distinct_dims=("pp", mesh), replicas=rule)
gradclip.Clipper(model, 1.0, reduce=reduce, distinct_dims="pp", dtype=torch.float64)
clipper.max_norm = torch.tensor(1.0)
clipper.clip_(8.0)
clipper.clip_(torch.tensor(8.0))
clipper(model, torch.tensor(1.0))
gradclip.clip_(model, torch.tensor(1.0), group=group, plain="replicated")
gradclip.clip_grad_norm_(model, 1.0, "inf", plain=mesh, group=group)
gradclip.get_total_norm([model.weight], reduce=reduce, replicas=rule)
gradclip.grad_norms(model, 2, plain=[0, 1], group=group, distinct_dims="pp")
gradclip.explain(model, group=group, plain="distinct")
gradclip.clip_grads_with_norm_(model, torch.tensor(1.0), torch.tensor(2.0))
gradclip.clip_(model, 1.0, plain="replicate")  # E
gradclip.clip_(model, "1")  # E
gradclip.clip_(model, 1.0, max_nrom=2.0)  # E
gradclip.grad_norms(model, plain="shards")  # E
gradclip.explain(model, replicas={"w": "else"})  # E
gradclip.Clipper(model, 1.0, plain="replicate")  # E
gradclip.Clipper(model, 1.0, replicas={"w": "else"})  # E
gradclip.Clipper(model, 1.0, norm_type="infinity")  # E
gradclip.Clipper(model, 1.0, max_nrom=2.0)  # E
gradclip.Clipper(model, 1.0, foreach=True)  # E
gradclip.Clipper(model, None)  # E
gradclip.Clipper(model)  # E
gradclip.Clipper(torch.optim.SGD(model.parameters()), 1.0)  # E
gradclip.Clipper([model], 1.0)  # E
clipper.clip_(model)  # E
clipper.coefficient < 1.0  # E
gradclip.clip(model, 1.0)  # E
gradclip.explian(model)  # E
"""


def test_calls(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "calls.py"
    path.write_text(CALLS)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    run = subprocess.run([*command, str(path)], cwd=ROOT, capture_output=True, text=True)
    refused = {int(line) for line in re.findall(r"calls\.py:(\d+): error", run.stdout)}
    lines = enumerate(CALLS.splitlines(), 1)
    assert refused == {number for number, line in lines if line.endswith("# E")}, run.stdout
