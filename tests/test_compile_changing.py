"""Numbers that change at every step need no graph of their own, and no step runs uncompiled."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import gradclip
from tests import oracle
from tests.gradients import gradient_of, parameters, random_values

BACKENDS = ["eager", "aot_eager", "inductor"]
MOST_GRAPHS = 3
"""One for the first value, one for all others, one for infinity."""

Owners = list[torch.nn.Parameter]
Call = Callable[[Owners, Any], Any]


def two_calls(owners: Owners, number: Any) -> Any:
    norm = gradclip.get_total_norm([gradient_of(owner) for owner in owners])
    gradclip.clip_grads_with_norm_(owners, number, norm)
    return norm


def raw(owners: Owners) -> Any:
    return [gradient_of(owner) for owner in owners]


CALLS: dict[str, Call] = {
    "clip_": lambda owners, number: gradclip.clip_(owners, number),
    "clip_grad_norm_": lambda owners, number: gradclip.clip_grad_norm_(owners, number),
    "scale=": lambda owners, number: gradclip.clip_(owners, 0.5, scale=number),
    "max_norm and scale=": lambda o, number: gradclip.clip_(o, number / 7, scale=number),
    "norm_type": lambda owners, number: gradclip.clip_(owners, 0.5, number),
    "eps": lambda owners, number: gradclip.clip_(owners, 0.5, eps=number),
    "norm_type of a total": lambda owners, number: gradclip.get_total_norm(raw(owners), number),
    "norm_type of norms": lambda owners, number: gradclip.grad_norms(owners, number),
    "two calls": two_calls,
    "total_norm": lambda owners, number: gradclip.clip_grads_with_norm_(owners, 0.5, number),
    "clip_value": lambda owners, number: gradclip.clip_grad_value_(owners, number),
    "coefficient": lambda owners, number: gradclip.scale_(raw(owners), number),
}

VALUES: dict[str, list[Any]] = {
    "floats": [0.3 + step / 7 for step in range(12)],
    "ints": list(range(1, 13)),
    "tensors": [torch.tensor(0.3 + step / 7, dtype=torch.float64) for step in range(12)],
    "float32 tensors": [torch.tensor(0.3 + step / 7) for step in range(12)],
    "NumPy scalars": [numpy.float64(0.3 + step / 7) for step in range(12)],
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(False)


def gradients() -> list[torch.Tensor]:
    return [
        random_values((16, 8), torch.float32, seed=1),
        random_values(33, torch.bfloat16, seed=2),
        random_values(5, torch.float64, seed=4),
    ]


def graphs_for(call: Call, values: Iterable[Any], backend: str) -> int:
    """The graphs that these calls make; each has the bits of the eager call."""
    counter = CompileCounterWithBackend(backend)
    graphed = torch.compile(call, backend=counter, fullgraph=True)
    for value in values:
        eager, compiled = (parameters(g.clone() for g in gradients()) for _ in range(2))
        want, result = call(eager, value), graphed(compiled, value)
        assert (result is None) == (want is None)
        assert want is None or oracle.same_bits(result, want), value
        for ours, other in zip(compiled, eager, strict=True):
            assert oracle.same_bits(gradient_of(ours), gradient_of(other)), value
    return counter.frame_count


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.filterwarnings("ignore")
def test_a_number_that_changes(call: Call, values: list[Any]) -> None:
    assert graphs_for(call, values, "aot_eager") <= MOST_GRAPHS


@pytest.mark.parametrize("values", ["floats", "tensors"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.filterwarnings("ignore")
def test_a_number_that_changes_under_inductor(call: Call, values: str) -> None:
    assert graphs_for(call, VALUES[values], "inductor") <= MOST_GRAPHS


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("first", [math.inf, 1.0, 2.5])
@pytest.mark.filterwarnings("ignore")
def test_infinity_among_the_numbers(first: float, backend: str) -> None:
    values = [first, 0.5, math.inf, 0.25, 1e-310, math.inf, 0.0, -0.0, 7.5, 1e300, 0.1]
    assert graphs_for(CALLS["clip_"], values, backend) <= MOST_GRAPHS


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore")
def test_norm_types_in_full_graphs(backend: str) -> None:
    norm_types: list[Any] = [2.0, 1.0, math.inf, 0.0, 3.0, "inf", 2, -math.inf, 0.5]
    for call in (CALLS["norm_type"], CALLS["norm_type of a total"], CALLS["norm_type of norms"]):
        torch._dynamo.reset()
        graphs_for(call, norm_types, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore")
def test_a_clipper_whose_limit_and_scale_change(backend: str) -> None:
    counter = CompileCounterWithBackend(backend)
    ours, other = parameters(gradients()), parameters(gradients())
    compiled, eager = gradclip.Clipper(ours, 1.0), gradclip.Clipper(other, 1.0)
    step = torch.compile(lambda scale: compiled.clip_(scale), backend=counter, fullgraph=True)
    for index in range(12):
        for owner, gradient in zip((*ours, *other), gradients() * 2, strict=True):
            gradient_of(owner).copy_(gradient)
        compiled.max_norm = eager.max_norm = 20.0 - index / 3
        scale = 8.0 + index
        assert oracle.same_bits(step(scale), eager.clip_(scale))
        assert compiled.coefficient == eager.coefficient
        for mine, yours in zip(ours, other, strict=True):
            assert oracle.same_bits(gradient_of(mine), gradient_of(yours))
    assert counter.frame_count <= MOST_GRAPHS


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore")
def test_a_clipper_with_a_tensor_as_limit(backend: str) -> None:
    (owner,) = parameters([torch.tensor([3.0, 4.0])])
    clipper = gradclip.Clipper([owner], 1.0, eps=0.0)
    step = torch.compile(clipper.clip_, backend=backend, fullgraph=True)
    limit: Any = torch.tensor(2.5)
    clipper.max_norm = limit
    assert step(torch.tensor(1.0)).item() == 5.0
    assert gradient_of(owner).tolist() == [1.5, 2.0]
    assert clipper.coefficient == 0.5
    limit.fill_(1.25)
    assert step(torch.tensor(2.0)).item() == 1.25
    assert gradient_of(owner).tolist() == [0.75, 1.0]


REFUSED: list[tuple[str, str, Any]] = [
    ("clip_", r"`max_norm` is -1\.0; expected", -1.0),
    ("clip_", r"`max_norm` is nan; expected", math.nan),
    ("clip_", r"`max_norm` has shape \(2,\)", torch.ones(2)),
    ("scale=", r"`scale` is 0\.0; expected", 0.0),
    ("scale=", r"`scale` is inf; expected", math.inf),
    ("norm_type", "`norm_type` is nan", math.nan),
    ("eps", r"`eps` is -1\.0; expected", -1.0),
    ("total_norm", r"`total_norm` is -1\.0; expected", -1.0),
    ("clip_value", r"`clip_value` is -2\.0; expected", torch.tensor(-2.0)),
    ("norm_type of norms", "`norm_type` is nan", torch.tensor(math.nan)),
    ("coefficient", r"`coefficient` has shape \(3,\)", torch.ones(3)),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "message", "value"), REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_the_eager_errors(name: str, message: str, value: Any, backend: str) -> None:
    """Of the first value, of one among others that change, and without any gradient."""
    call = CALLS[name]
    for before in ([], [0.5, 0.75, 1.5]):
        torch._dynamo.reset()
        graphed = torch.compile(call, backend=backend, fullgraph=True)
        for number in before:
            graphed(parameters(gradients()), number)
        owners = parameters(gradients())
        with pytest.raises(ValueError, match=message):
            call(owners, value)
        with pytest.raises(ValueError, match=message):
            graphed(owners, value)
        for owner, gradient in zip(owners, gradients(), strict=True):
            assert oracle.same_bits(gradient_of(owner), gradient)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore")
def test_the_eager_errors_without_gradients(backend: str) -> None:
    without = [torch.nn.Parameter(torch.ones(2))]
    for name, message, value in REFUSED:
        if "total" in name or name == "coefficient":
            continue
        torch._dynamo.reset()
        graphed = torch.compile(CALLS[name], backend=backend, fullgraph=True)
        with pytest.raises(ValueError, match=message):
            graphed(without, value)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore")
def test_random_numbers_beside_the_eager_call(backend: str) -> None:
    """All numbers at once, of random kinds, step after step in the same compiled function."""

    def call(owners: Owners, numbers: Any) -> Any:
        p, limit, eps, scale = numbers
        return gradclip.clip_(owners, limit, p, eps=eps, scale=scale)

    random = torch.Generator().manual_seed(5)
    as_tensor = torch.tensor(0.0), torch.tensor(0.0, dtype=torch.float64)
    graphed = torch.compile(call, backend=backend, fullgraph=True)
    for _ in range(20):
        norm_type = [2.0, 1.0, math.inf, 3.0][int(torch.randint(4, (), generator=random))]
        draws = torch.rand(3, generator=random, dtype=torch.float64).tolist()
        eps, limit, scale = draws[0] / 100, draws[1] * 4, 2.0 ** int(draws[2] * 9)
        kind = int(torch.randint(3, (), generator=random))
        numbers = (norm_type, limit if kind == 2 else as_tensor[kind] + limit, eps, scale)
        eager, compiled = (parameters(g.clone() for g in gradients()) for _ in range(2))
        assert oracle.same_bits(graphed(compiled, numbers), call(eager, numbers))
        for ours, other in zip(compiled, eager, strict=True):
            assert oracle.same_bits(gradient_of(ours), gradient_of(other))
