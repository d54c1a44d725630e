"""A default device, such as `with torch.device("meta")`, is no concern of gradients elsewhere."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import gradclip
from tests import oracle
from tests.gradients import FLOAT8_DTYPES, parameters

LISTS: dict[str, Callable[[], list[Tensor]]] = {
    "float32": lambda: [torch.tensor([3.0, -4.0]), torch.tensor([[12.0]])],
    "mixed": lambda: [torch.ones(3, dtype=d) for d in (torch.bfloat16, torch.float64)],
    "float8": lambda: [torch.ones(3).to(FLOAT8_DTYPES[0]), torch.ones(2)],
    "sparse": lambda: [
        torch.sparse_coo_tensor(
            torch.tensor([[1, 0, 1]]), torch.tensor([3.0, 4.0, 5.0]), (4,), check_invariants=False
        )
    ],
    "strided": lambda: [torch.arange(81.0).view(3, 3, 3, 3)[::2, ::2, ::2, ::2]],
    "expanded": lambda: [torch.ones(1, 4).expand(3, 4)],
}

CALLS: dict[str, Callable[[list[Any], list[Tensor]], Any]] = {
    "clip_": lambda owners, _: gradclip.clip_(owners, 1.0),
    "clip_ to bfloat16": lambda owners, _: gradclip.clip_(owners, 1.0, dtype=torch.bfloat16),
    "clip_ with a scale": lambda owners, _: gradclip.clip_(owners, 1.0, scale=8.0),
    "clip_ of p = 3.5": lambda owners, _: gradclip.clip_(owners, 1.0, 3.5),
    "clip_ of p = 1e-20": lambda owners, _: gradclip.clip_(owners, 1.0, 1e-20),
    "clip_ of p = -inf": lambda owners, _: gradclip.clip_(owners, 1.0, -math.inf),
    "clip_ that checks": lambda owners, _: gradclip.clip_(owners, 1.0, error_if_nonfinite=True),
    "clip_grad_norm_": lambda owners, _: gradclip.clip_grad_norm_(owners, 1.0),
    "get_total_norm": lambda _, tensors: gradclip.get_total_norm(tensors),
    "norm, then scale": lambda owners, tensors: gradclip.clip_grads_with_norm_(
        owners, 1.0, gradclip.get_total_norm(tensors)
    ),
    "clip_grads_with_norm_": lambda owners, _: gradclip.clip_grads_with_norm_(owners, 1.0, 13.0),
    "clip_grad_value_": lambda owners, _: gradclip.clip_grad_value_(owners, 0.3),
    "grad_norms": lambda owners, _: gradclip.grad_norms(owners),
    "scale_": lambda _, tensors: gradclip.scale_(tensors, 0.3),
    "Clipper": lambda owners, _: gradclip.Clipper(owners, 1.0)(),
    "explain": lambda owners, _: str(gradclip.explain(owners)),
}


@pytest.fixture(params=["with", "set_default_device"])
def meta_by_default(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A context manager that makes "meta" the default device, in either way."""
    if request.param == "with":
        yield lambda: torch.device("meta")
        return

    class Default:
        def __enter__(self) -> None:
            torch.set_default_device("meta")

        def __exit__(self, *_: object) -> None:
            torch.set_default_device(None)

    yield Default
    torch.set_default_device(None)


def called(name: str, kind: str, mode: Callable[[], Any]) -> tuple[Any, list[Tensor]]:
    """What a call returns in a mode, and what it leaves in the gradients."""
    tensors = LISTS[kind]()
    owners = parameters(tensors)
    with mode():
        result = CALLS[name](owners, tensors)
    return result, tensors


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_does_what_it_does_without(
    name: str, kind: str, meta_by_default: Callable[[], Any], route: str
) -> None:
    want, kept = called(name, kind, lambda: torch.device("cpu"))
    found, written = called(name, kind, meta_by_default)
    if isinstance(want, Tensor):
        assert found.device.type == "cpu"
        assert oracle.same_bits(found, want)
    else:
        assert found == want
    for tensor, other in zip(written, kept, strict=True):
        assert oracle.same_bits(stored(tensor), stored(other))


def stored(tensor: Tensor) -> Tensor:
    return tensor._values() if tensor.layout == torch.sparse_coo else tensor


def test_no_gradient(meta_by_default: Callable[[], Any]) -> None:
    owner = torch.nn.Parameter(torch.ones(2))
    with meta_by_default(), pytest.warns(UserWarning, match="no parameter has a gradient"):
        assert gradclip.clip_([owner], 1.0).device.type == "cpu"


def test_gradients_of_samples(meta_by_default: Callable[[], Any]) -> None:
    values = torch.tensor([[3.0, 4.0], [6.0, 8.0]])
    with meta_by_default():
        found = torch.func.vmap(lambda g: gradclip.get_total_norm([g]))(values)
    assert found.tolist() == [5.0, 10.0]
