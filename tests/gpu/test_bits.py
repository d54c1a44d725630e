"""Results on the device equal the CPU engine's and the oracle's, bit for bit."""

import math
import random

import pytest
import torch

import gradclip
from gradclip import _core, cuda
from tests import oracle

from .support import DEVICE, REAL, bits, device_sums, heavy, host_sums, parameters

pytestmark = pytest.mark.gpu

ORDERS = [0.0, 1.0, 2.0, 3.0, 4.0, math.inf, -math.inf]


def mixture(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Sizes from 0 to 3 M, odd offsets, rows, heavy tails, subnormals."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    flat = (torch.randn(3_000_000, device=DEVICE) * 1e-3).to(dtype)
    tiny = torch.finfo(dtype).smallest_normal
    return [
        flat[: rng.randrange(2_000_000, 3_000_000)],
        torch.empty(0, device=DEVICE, dtype=dtype),
        (torch.randn(70_001, device=DEVICE).to(dtype))[rng.randrange(1, 9) :],
        torch.randn(300, 500, device=DEVICE).to(dtype)[:, 3 : rng.randrange(100, 490)],
        torch.randn(64, 90, device=DEVICE).to(dtype).t(),
        heavy(rng.randrange(1, 200_000), dtype, sigma=rng.uniform(0.1, 9)),
        (torch.randn(5000, device=DEVICE, dtype=torch.float64) * tiny).to(dtype),
        torch.zeros(100_003, device=DEVICE, dtype=dtype),
        torch.randn(1, device=DEVICE).to(dtype),
    ]


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("seed", range(3))
def test_sums_have_the_bits_of_the_cpu(p: float, dtype: torch.dtype, seed: int) -> None:
    tensors = mixture(dtype, seed)
    assert device_sums(tensors, p) == host_sums(tensors, p)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf, 0.0])
def test_mixed_dtypes(p: float) -> None:
    tensors = [tensor for dtype in REAL for tensor in mixture(dtype, 7)[2:]]
    assert device_sums(tensors, p) == host_sums(tensors, p)
    ours = float(gradclip.get_total_norm(tensors, p))
    assert ours == float(gradclip.get_total_norm([t.cpu() for t in tensors], p))


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 7, 65_535, 65_536, 99_998, 99_999])
def test_not_finite(dtype: torch.dtype, bad: float, place: int) -> None:
    values = torch.randn(100_000, device=DEVICE).to(dtype)
    values[place] = bad
    for p in (1.0, 2.0, math.inf, 0.0):
        assert device_sums([values], p) == host_sums([values], p)


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.0, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex(p: float, dtype: torch.dtype) -> None:
    values = [torch.randn(30_001, dtype=dtype, device=DEVICE), torch.zeros(3, 3, dtype=dtype)]
    values[1] = values[1].to(DEVICE)
    assert device_sums(values, p) == host_sums(values, p)


@pytest.mark.parametrize("p", [0.5, 2.5, -1.0, 10.0, 30.0, 1001.0])
def test_other_orders(p: float) -> None:
    values = [(torch.rand(20_000, device=DEVICE) + 0.1).bfloat16() * 3]
    ours = float(gradclip.get_total_norm(values, p, dtype=torch.float64))
    theirs = float(gradclip.get_total_norm([v.cpu() for v in values], p, dtype=torch.float64))
    assert abs(ours - theirs) <= 4 * math.ulp(theirs)
    assert ours == float(gradclip.get_total_norm(values, p, dtype=torch.float64))


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("max_norm", [0.5, 1e30])
def test_clip_equals_the_oracle(dtype: torch.dtype, max_norm: float) -> None:
    tensors = [(torch.randn(size, device=DEVICE)).to(dtype) for size in (1, 77, 4096, 70_000)]
    total = oracle.total_norm([t.cpu() for t in tensors])
    expected = [oracle.clipped(t.cpu(), total, max_norm) for t in tensors]
    result = gradclip.clip_(parameters(tensors), max_norm, dtype=torch.float64)
    assert result.device == DEVICE
    assert float(result) == total
    for tensor, wanted in zip(tensors, expected, strict=True):
        assert torch.equal(bits(tensor.cpu()), bits(wanted))


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 3.0, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", REAL)
def test_clip_equals_the_cpu_engine(p: float, dtype: torch.dtype) -> None:
    tensors = [(torch.randn(size, device=DEVICE)).to(dtype) for size in (1, 77, 4096, 70_000)]
    copies, host = ([t.cpu().clone() for t in tensors] for _ in range(2))
    max_norm = 0.5 * float(gradclip.get_total_norm(host, p, dtype=torch.float64))
    ours = float(gradclip.clip_(parameters(tensors), max_norm, p, dtype=torch.float64))
    theirs = float(gradclip.clip_(parameters(host), max_norm, p, dtype=torch.float64))
    assert abs(ours - theirs) <= (4 * math.ulp(theirs) if p == 0.5 else 0.0)
    expected = [oracle.clipped(copy, ours, max_norm) for copy in copies] if p == 0.5 else host
    for tensor, wanted in zip(tensors, expected, strict=True):
        assert torch.equal(bits(tensor.cpu()), bits(wanted))


@pytest.mark.parametrize("p", [2.0, 2.5])
def test_a_clip_in_two_steps_is_the_clip_in_one(p: float) -> None:
    tensors = [torch.randn(size, device=DEVICE) for size in (5, 4097)]
    once, copies = [t.clone() for t in tensors], [t.clone() for t in tensors]
    owners = parameters(copies)
    clipper = gradclip.Clipper(owners, 1.0, p)
    gradclip.clip_(parameters(once), 1.0, p)
    total = gradclip.get_total_norm(tensors, p)
    gradclip.clip_grads_with_norm_(parameters(tensors), 1.0, total)
    assert float(clipper.clip_()) == float(total)
    assert clipper.coefficient is not None
    assert float(clipper.coefficient) < 1
    for first, second, third in zip(once, tensors, copies, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first, third)


@pytest.mark.parametrize("dtype", REAL)
def test_memory_around_views_is_untouched(dtype: torch.dtype) -> None:
    whole = torch.randn(200_000, device=DEVICE).to(dtype)
    expected = whole.cpu().clone()
    views = [whole[1:70_000], whole[70_003:70_004], whole[100_000:].view(100, 1000)[:, 5:333]]
    like = [expected[1:70_000], expected[70_003:70_004]]
    like.append(expected[100_000:].view(100, 1000)[:, 5:333])
    total = oracle.total_norm(like)
    for view in like:
        view.copy_(oracle.clipped(view, total, 1.0))
    gradclip.clip_(parameters(views), 1.0)
    assert torch.equal(bits(whole.cpu()), bits(expected))


@pytest.mark.parametrize("dtype", REAL)
def test_value_clip(dtype: torch.dtype) -> None:
    values = torch.randn(100_001, device=DEVICE).to(dtype)
    values[5], values[7] = math.nan, math.inf
    expected = values.cpu().clamp(-0.3, 0.3)
    gradclip.clip_grad_value_(parameters([values]), 0.3)
    assert torch.equal(values.cpu().isnan(), expected.isnan())
    assert torch.equal(values.cpu().nan_to_num(), expected.nan_to_num())


def test_expanded_weighs_its_copies() -> None:
    row = torch.randn(1000, device=DEVICE)
    assert device_sums([row.expand(70_000, 1000)], 2.0) == host_sums([row.expand(70_000, 1000)], 2)


def test_owned_slices_add_up() -> None:
    values = torch.randn(100, 1001, device=DEVICE).t()
    cut = 33_333
    parts = []
    for owned in ((0, cut), (cut, values.numel()), (5, 5)):
        core = _core.Gradients.from_tensors([values], None, [owned])
        parts.append(_core.Sums.from_list(cuda.CudaEngine(core, 0).sums(2.0).tolist()))
    together = parts[0].merged(parts[1]).merged(parts[2])
    assert together.to_list() == host_sums([values], 2.0)


def test_norms_of_each() -> None:
    tensors = [torch.randn(size, device=DEVICE) for size in (10, 100_000, 1)]
    tensors[1][7] = math.inf
    norms = gradclip.grad_norms(parameters(tensors), dtype=torch.float64)
    assert norms.tolist() == [oracle.total_norm([t.cpu()]) for t in tensors]


@pytest.mark.large
def test_more_than_two_billion_elements() -> None:
    values = torch.zeros(2**31 + 8, dtype=torch.bfloat16, device=DEVICE)
    values[0], values[2**31 + 7], values[2**31 - 1] = 3.0, 4.0, 12.0
    result = gradclip.clip_(parameters([values]), 6.5, eps=0.0)
    assert float(result) == 13.0
    assert [float(values[k]) for k in (0, 2**31 - 1, 2**31 + 7)] == [1.5, 6.0, 2.0]
