"""Tensor subclasses that hold their elements elsewhere."""

import math
from typing import Any

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

import gradclip
from gradclip import _core, reference
from tests import oracle
from tests.gradients import EXACT_NORMS


def owner(gradient: Any) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.main_grad = gradient  # type: ignore[attr-defined]
    return parameter


def two(*values: float, dtype: torch.dtype = torch.float32) -> Any:
    return TwoTensor(torch.tensor(values, dtype=dtype), torch.tensor(values, dtype=dtype))


def pending(*values: float) -> Any:
    return AsyncCollectiveTensor(torch.tensor(values))


def test_a_wrapper_counts_its_outer_elements(route: str) -> None:
    wrapper, plain = two(3.0, 4.0), torch.tensor([12.0])
    total = gradclip.clip_([owner(wrapper), owner(plain)], 1.0, grad="main_grad")
    assert total.item() == 13.0
    assert type(total) is torch.Tensor
    for tensor, old in ((wrapper.a, [3.0, 4.0]), (wrapper.b, [3.0, 4.0]), (plain, [12.0])):
        assert oracle.same_bits(tensor, oracle.clipped(torch.tensor(old), 13.0, 1.0))


def test_several_wrappers_share_nothing(route: str) -> None:
    for make in (two, pending):
        wrappers = [make(3.0, 4.0), make(12.0)]
        owners = [owner(wrapper) for wrapper in wrappers]
        assert gradclip.clip_(owners, math.inf, grad="main_grad").item() == 13.0
        assert gradclip.get_total_norm(wrappers).item() == 13.0
        assert gradclip.grad_norms(owners, grad="main_grad").tolist() == [5.0, 12.0]


@pytest.mark.parametrize("p", [*EXACT_NORMS, 3.0, 1e-20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_wrappers_have_the_bits_of_plain_tensors(p: float, dtype: torch.dtype) -> None:
    plain = torch.randn(5, 7).to(dtype)
    wrapper: Any = TwoTensor(plain.clone(), plain.clone())
    want = _core.Sums.from_list(reference.sums(plain, p).tolist()).total(p)
    assert gradclip.get_total_norm([wrapper], p, dtype=torch.float64).item() == want
    expanded: Any = TwoTensor(plain[:1].expand(5, 7), plain[:1].expand(5, 7))
    found = gradclip.get_total_norm([expanded], p, dtype=torch.float64)
    same = gradclip.get_total_norm([plain[:1].expand(5, 7)], p, dtype=torch.float64)
    assert found.item() == same.item()


def test_wrappers_are_scaled_and_limited(route: str) -> None:
    for make in (two, pending):
        wrapper = make(3.0, -4.0)
        gradclip.scale_([wrapper], 0.5)
        assert (wrapper + 0).tolist() if make is pending else wrapper.b.tolist() == [1.5, -2.0]
        gradclip.clip_grad_value_([owner(wrapper)], 1.75, grad="main_grad")
        inner = wrapper.elem if make is pending else wrapper.a
        assert inner.tolist() == [1.5, -1.75]


def test_wrappers_that_do_share_memory(route: str) -> None:
    values = torch.tensor([3.0, 4.0])
    for first, second in (
        (TwoTensor(values, values.clone()), values),
        (AsyncCollectiveTensor(values), values),
        (TwoTensor(values, values.clone()), TwoTensor(values.clone(), values)),
    ):
        with pytest.raises(ValueError, match="parameter 0 and parameter 1 share memory"):
            gradclip.clip_([owner(first), owner(second)], 1.0, grad="main_grad")
    assert values.tolist() == [3.0, 4.0]


def test_an_asynchronous_result_is_waited_for(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the wait brings the elements, as it may on a device."""
    gradient = pending(0.0, 0.0)

    def wait() -> torch.Tensor:
        elements: torch.Tensor = gradient.elem
        elements.copy_(torch.tensor([3.0, 4.0]))
        return elements

    monkeypatch.setattr(AsyncCollectiveTensor, "wait", lambda self: wait())
    assert gradclip.clip_([owner(gradient)], 1.0, eps=0.0, grad="main_grad").item() == 5.0
    assert gradient.elem.tolist() == pytest.approx([0.6, 0.8])


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_masked_tensors(route: str) -> None:
    plain = torch.tensor([12.0])
    masked = masked_tensor(torch.tensor([3.0, 4.0]), torch.tensor([True, False]))
    with pytest.raises(TypeError, match="gradient of parameter 1 is a MaskedTensor") as refusal:
        gradclip.clip_([owner(plain), owner(masked)], 1.0, grad="main_grad")
    named = str(refusal.value).rsplit("`", 2)[1]
    assert eval(f"masked{named}", {"masked": masked}).tolist() == [3.0, 0.0]
    assert plain.tolist() == [12.0]
