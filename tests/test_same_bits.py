"""The bits of the total do not depend on how elements are split, ordered, laid out or shared."""

import functools
import math
import random

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import gradclip
from tests import oracle
from tests.gradients import (
    EXACT_NORMS,
    FULL_SPREAD,
    REAL_DTYPES,
    gradient_of,
    parameters,
    random_values,
    total,
)

BLOCK = 4096
"""Elements that the CPU engine sums at a time."""

SIZES = [0, 1, 2, 3, 7, 8, 9, 31, 33, 255, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5]

DTYPE = st.sampled_from(REAL_DTYPES)
NORM = st.sampled_from([*EXACT_NORMS, 3.0, 4.0, 7.0])

FLOAT64 = torch.float64


@st.composite
def gradients(draw: st.DrawFn) -> torch.Tensor:
    """A 1-dim gradient: ordinary, heavy-tailed or over the type's whole range."""
    dtype = draw(DTYPE)
    share = draw(st.sampled_from([0.0, 0.1, 1.0]))
    spread = int(share * FULL_SPREAD[dtype])
    seed = draw(st.integers(0, 2**30))
    return random_values(draw(st.sampled_from(SIZES)), dtype, spread=spread, seed=seed)


LISTS = st.lists(gradients(), min_size=1, max_size=5)


@st.composite
def small_lists(draw: st.DrawFn) -> list[torch.Tensor]:
    """Lists of a few elements chosen one by one, subnormal and non-finite ones among them."""
    widths = {torch.float16: 16, torch.float32: 32, torch.float64: 64}
    tensors = []
    for _ in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(sorted(widths, key=str)))
        numbers = st.floats(width=widths[dtype], allow_subnormal=True)  # type: ignore[arg-type]
        tensors.append(torch.tensor(draw(st.lists(numbers, max_size=6)), dtype=dtype))
    return tensors


def agree(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


@hypothesis.given(small_lists(), st.sampled_from(EXACT_NORMS))
def test_any_elements_give_the_oracles_norm(tensors: list[torch.Tensor], p: float) -> None:
    assert agree(total(tensors, p), oracle.total_norm(tensors, p))


@hypothesis.given(LISTS, st.sampled_from(EXACT_NORMS))
def test_any_dtypes_and_sizes_give_the_oracles_norm(tensors: list[torch.Tensor], p: float) -> None:
    assert total(tensors, p) == oracle.total_norm(tensors, p)


@hypothesis.given(LISTS, NORM, st.randoms(use_true_random=False))
def test_order_of_tensors_and_of_elements(
    tensors: list[torch.Tensor], p: float, shuffler: random.Random
) -> None:
    want = total(tensors, p)
    shuffled = [tensor[torch.randperm(len(tensor))] for tensor in tensors]
    shuffler.shuffle(shuffled)
    assert total(shuffled, p) == want


@hypothesis.given(gradients(), NORM, st.lists(st.floats(0, 1), max_size=6))
def test_any_split_into_tensors(gradient: torch.Tensor, p: float, cuts: list[float]) -> None:
    places = sorted({int(cut * len(gradient)) for cut in cuts})
    pieces = [piece.clone() for piece in torch.tensor_split(gradient, places)]
    assert total(pieces, p) == total([gradient], p)


@hypothesis.given(gradients(), NORM)
def test_any_wider_dtype_gives_the_same_norm(gradient: torch.Tensor, p: float) -> None:
    assert total([gradient.to(FLOAT64)], p) == total([gradient], p)


@hypothesis.given(
    gradients(), NORM, st.integers(0, 3), st.sampled_from([1, 2, 3, 5]), st.booleans()
)
def test_offsets_strides_and_dimensions(
    gradient: torch.Tensor, p: float, offset: int, step: int, is_matrix: bool
) -> None:
    storage = torch.full((offset + step * len(gradient) + 1,), math.nan, dtype=gradient.dtype)
    view = storage[offset : offset + step * len(gradient) : step]
    view.copy_(gradient)
    if is_matrix and len(gradient) % 2 == 0:
        view = view.unflatten(0, (2, len(gradient) // 2)).t()
    assert total([view], p) == total([gradient], p)


@hypothesis.given(st.integers(-60, 60), gradients())
def test_powers_of_two_scale_the_norm_exactly(exponent: int, gradient: torch.Tensor) -> None:
    wide = gradient.to(FLOAT64)
    hypothesis.assume(len(wide) > 0)
    hypothesis.assume(bool(((wide == 0) | (wide.abs() > 2.0**-900)).all()))
    hypothesis.assume(bool((wide.abs() < 2.0**900).all()))
    for p in (1.0, 2.0, 3.0, math.inf):
        assert total([wide * 2.0**exponent], p) == total([wide], p) * 2.0**exponent


@functools.cache
def large_list() -> list[torch.Tensor]:
    """Enough elements for several threads, over all the range, an odd number in each."""
    sizes = [300_001, 7, 65_537, 131_071]
    return [
        random_values(n, dtype, spread=FULL_SPREAD[dtype] // 4, seed=n)
        for n, dtype in zip(sizes, REAL_DTYPES, strict=True)
    ]


@pytest.mark.parametrize("p", [*EXACT_NORMS, 3.0, 1.5])
def test_thread_counts(p: float) -> None:
    norms = set()
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        norms |= {total(large_list(), p) for _ in range(2)}
    assert len(norms) == 1
    if p in EXACT_NORMS:
        assert norms == {oracle.total_norm(large_list(), p)}


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_clipped_bits_with_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    owners = parameters(gradient.clone() for gradient in large_list())
    norm = gradclip.clip_(owners, 1e-3, dtype=FLOAT64).item()
    for owner, gradient in zip(owners, large_list(), strict=True):
        assert oracle.same_bits(gradient_of(owner), oracle.clipped(gradient, norm, 1e-3))


@hypothesis.given(LISTS, st.sampled_from([1e-30, 0.5, 3.0]))
def test_clipped_bits_do_not_depend_on_the_split(
    tensors: list[torch.Tensor], max_norm: float
) -> None:
    norm = oracle.total_norm(tensors)
    whole = parameters(tensor.clone() for tensor in tensors)
    halves = [half.clone() for tensor in tensors for half in tensor.tensor_split(2)]
    owners = parameters(halves)
    gradclip.clip_(whole, max_norm)
    gradclip.clip_(owners, max_norm)
    pairs = zip(owners[::2], owners[1::2], strict=True)
    for owner, (first, second), tensor in zip(whole, pairs, tensors, strict=True):
        want = oracle.clipped(tensor, norm, max_norm)
        assert oracle.same_bits(gradient_of(owner), want)
        assert oracle.same_bits(torch.cat([gradient_of(first), gradient_of(second)]), want)


@hypothesis.given(LISTS)
def test_a_second_clip_finds_the_limit_kept(tensors: list[torch.Tensor]) -> None:
    owners = parameters(tensor.to(FLOAT64) for tensor in tensors)
    gradclip.clip_(owners, 1.0)
    assert gradclip.clip_(owners, math.inf, dtype=FLOAT64).item() <= 1 + 2.0**-50
