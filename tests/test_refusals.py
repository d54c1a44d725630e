"""Gradients for torch operations: what is refused, by name, before anything is written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gradclip

FLOAT8 = torch.float8_e4m3fn


def owner(gradient: Any) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.main_grad = gradient  # type: ignore[attr-defined]
    return parameter


def eights() -> torch.Tensor:
    return torch.full((4,), 8.0).to(FLOAT8)


def shared_float8() -> list[torch.Tensor]:
    values = eights()
    return [values, values[1:]]


def sparse_over_dense() -> list[torch.Tensor]:
    values = torch.full((4,), 8.0)
    indices = torch.tensor([[0, 1]])
    return [
        values,
        torch.sparse_coo_tensor(
            indices, values[:2], (5,), is_coalesced=True, check_invariants=False
        ),
    ]


def float8_over_float32() -> list[torch.Tensor]:
    values = torch.full((4,), 8.0)
    return [values, values.view(FLOAT8)]


@pytest.mark.parametrize("shared", [shared_float8, sparse_over_dense, float8_over_float32])
def test_memory_shared_with_the_reference_path(shared: Callable[[], list[torch.Tensor]]) -> None:
    gradients = shared()
    before = [g.to_dense().float().clone() for g in gradients]
    with pytest.raises(ValueError, match="share memory; give one of them"):
        gradclip.clip_([owner(g) for g in gradients], 1.0, grad="main_grad")
    for gradient, old in zip(gradients, before, strict=True):
        assert torch.equal(gradient.to_dense().float(), old)


def test_float8_side_by_side_in_one_buffer() -> None:
    values = eights()
    norm = gradclip.clip_([owner(values[:2]), owner(values[2:])], 8.0, grad="main_grad")
    assert norm.item() == 16.0


def test_float8_that_overlaps_itself() -> None:
    gradient = torch.as_strided(eights(), (2, 3), (1, 1))
    with pytest.raises(ValueError, match=r"parameter 0 overlaps itself \(strides \(1, 1\)\)"):
        gradclip.clip_([owner(gradient)], 1.0, grad="main_grad")


def test_fake_among_real() -> None:
    dense = torch.tensor([3.0, 4.0])
    with FakeTensorMode():
        fake = torch.ones(2)
    with pytest.raises(TypeError, match="parameter 1 is a fake tensor among others"):
        gradclip.clip_([owner(dense), owner(fake)], 1.0, grad="main_grad")
    assert dense.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("first", ["meta", "cpu"])
def test_meta_among_real(first: str) -> None:
    """A meta gradient has no values: it would count as zeros."""
    dense = torch.tensor([3.0, 4.0])
    owners = [owner(dense), owner(torch.ones(2, device="meta"))]
    if first == "meta":
        owners.reverse()
    with pytest.raises(TypeError, match="is a meta tensor among others"):
        gradclip.clip_(owners, 1.0, grad="main_grad")
    assert dense.tolist() == [3.0, 4.0]


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("gradient", "remedy"),
    [
        (quantized, torch.Tensor.dequantize),
        (lambda: torch.eye(2).to_sparse_csr(), torch.Tensor.to_sparse_coo),
        (lambda: torch.ones(2, 2).to_mkldnn(), torch.Tensor.to_dense),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]),
            lambda g: g.to_padded_tensor(0.0),
        ),
    ],
    ids=["quantized", "csr", "mkldnn", "nested"],
)
@pytest.mark.filterwarnings("ignore")
def test_the_remedy_that_is_named_helps(
    gradient: Callable[[], torch.Tensor], remedy: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    found = gradient()
    with pytest.raises(TypeError, match="gradient of parameter 0") as refusal:
        gradclip.clip_([owner(found)], 1.0, grad="main_grad")
    named = str(refusal.value).rsplit("`", 2)[1]
    made: torch.Tensor = eval(f"found{named}", {"torch": torch, "found": found})
    assert torch.equal(made.to_dense(), remedy(found).to_dense())
    assert gradclip.clip_([owner(made)], 1.0, grad="main_grad").isfinite()


def test_an_attribute_that_holds_no_tensor() -> None:
    with pytest.raises(TypeError, match="parameter 0 is a list; expected a tensor or None"):
        gradclip.clip_([owner([1.0])], 1.0, grad="main_grad")


def test_an_attribute_that_is_not_there() -> None:
    with pytest.raises(
        AttributeError, match="`w` has no attribute `main_grad`; name the attribute"
    ):
        gradclip.clip_([("w", torch.nn.Parameter(torch.zeros(1)))], 1.0, grad="main_grad")


@pytest.mark.parametrize(
    ("parameters", "position"),
    [
        (lambda a, b: [(a, b)], 0),
        (lambda a, b: [("a", a), b], 1),
        (lambda a, b: [("a", 1, a)], 0),
    ],
)
def test_tuples_that_are_no_pairs(parameters: Callable[..., Any], position: int) -> None:
    a, b = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    with pytest.raises(TypeError, match=rf"no \(name, tensor\) pair at position {position}"):
        gradclip.clip_(parameters(a, b), 1.0)
