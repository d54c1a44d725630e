"""Roundings, tiny powers, sparse lists and wrappers on the device: the numbers of the host."""

import math
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import gradclip
from tests import oracle
from tests.gpu.support import DEVICE, REAL, parameters

pytestmark = pytest.mark.gpu

TIE = 1 + 2.0**-8 + 2.0**-30


@pytest.mark.parametrize(
    ("dtype", "value", "wanted"),
    [
        (torch.bfloat16, TIE, 1.0078125),
        (torch.float16, 1 + 2.0**-11 + 2.0**-30, 1 + 2.0**-10),
        (torch.float32, 1 + 2.0**-24 + 2.0**-50, 1 + 2.0**-23),
    ],
)
def test_a_total_is_rounded_once(dtype: torch.dtype, value: float, wanted: float) -> None:
    gradient = torch.tensor([value], dtype=torch.float64, device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = gradclip.get_total_norm([gradient], dtype=dtype)
        gradclip.clip_grads_with_norm_(parameters([gradient]), 0.5, found, eps=0.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.item() == wanted
    assert gradient.item() == value * (0.5 / value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_limits_are_rounded_once(dtype: torch.dtype) -> None:
    limit = TIE if dtype == torch.bfloat16 else 1 + 2.0**-11 + 2.0**-30
    gradient = torch.tensor([3.0, -3.0, 0.5], dtype=dtype, device=DEVICE)
    host = gradient.cpu()
    gradclip.clip_grad_value_(parameters([gradient]), limit)
    gradclip.clip_grad_value_(parameters([host]), limit)
    assert gradient.tolist() == host.tolist()
    assert gradient[0].item() > 1


@pytest.mark.parametrize("p", [1e-20, -1e-20, 1e-4, -1e-4])
@pytest.mark.parametrize("dtype", [*REAL, torch.complex64])
def test_tiny_powers(p: float, dtype: torch.dtype) -> None:
    one = torch.zeros(100_000, dtype=dtype, device=DEVICE)
    one[777] = -2.5
    several = torch.ones(5, dtype=dtype, device=DEVICE)
    odd = torch.tensor([math.inf, 2.0, 0.0], device=DEVICE).to(dtype)
    for tensors in ([one], [one[777:778]], [several], [one, several], [odd], [odd[:2]], [odd[:1]]):
        found = gradclip.get_total_norm(tensors, p, dtype=torch.float64).item()
        host = gradclip.get_total_norm([t.cpu() for t in tensors], p, dtype=torch.float64).item()
        assert found == host
    each = gradclip.grad_norms(parameters([one, several, odd[:2]]), p)
    assert (
        each.cpu().tolist()
        == gradclip.grad_norms(parameters([one.cpu(), several.cpu(), odd[:2].cpu()]), p).tolist()
    )


@pytest.mark.parametrize("dtype", [*REAL, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("p", [0.0, 2.0, math.inf])
def test_lists_of_sparse_gradients(dtype: torch.dtype, p: float) -> None:
    rows = torch.randint(0, 40, (1, 300), device=DEVICE)
    values = torch.randn(300, 17, device=DEVICE).to(dtype)
    gradient = torch.sparse_coo_tensor(rows, values, (40, 17), check_invariants=False)
    host = torch.sparse_coo_tensor(rows.cpu(), values.cpu(), (40, 17), check_invariants=False)
    found = gradclip.get_total_norm([gradient], p, dtype=torch.float64).item()
    assert found == gradclip.get_total_norm([host], p, dtype=torch.float64).item()
    assert found == oracle.total_norm([host], p)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_wrappers_and_halves_of_complex() -> None:
    values = torch.tensor([3.0, 4.0], device=DEVICE)
    wrapper: Any = TwoTensor(values, values.clone())
    plain = torch.tensor([12.0], device=DEVICE)
    half = torch.tensor([84 + 0j], dtype=torch.complex32, device=DEVICE)
    total = gradclip.get_total_norm([wrapper, plain, half])
    assert total.item() == 85.0
    gradclip.scale_([wrapper, plain, half], 0.5)
    assert (values.tolist(), plain.tolist(), half.tolist()) == ([1.5, 2.0], [6.0], [42 + 0j])


def test_samples_of_a_map() -> None:
    values = torch.tensor([[3.0, 4.0], [6.0, 8.0]], device=DEVICE)
    found = torch.func.vmap(lambda g: gradclip.get_total_norm([g]))(values)
    assert found.tolist() == [5.0, 10.0]
