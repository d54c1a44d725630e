"""torch.compile takes every call in one graph, with the bits of the eager call."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradclip
from tests import oracle
from tests.gradients import gradient_of, parameters, random_values

BACKENDS = ["eager", "aot_eager", "inductor"]

Call = Callable[[Any], Any]


def two_calls(owners: Any) -> torch.Tensor:
    norm = gradclip.get_total_norm([owner.grad for owner in owners])
    gradclip.clip_grads_with_norm_(owners, 0.5, norm)
    return norm


CALLS: dict[str, Call] = {
    "clip_": lambda owners: gradclip.clip_(owners, 0.5),
    "clip_ with options": lambda owners: gradclip.clip_(
        owners, 0.5, 3.0, error_if_nonfinite=True, dtype=torch.float64, eps=0.0, scale=8.0
    ),
    "clip_ without effect": lambda owners: gradclip.clip_(owners, math.inf, 1.0),
    "clip_grad_norm_": lambda owners: gradclip.clip_grad_norm_(owners, 0.5, math.inf, True, None),
    "two calls": two_calls,
    "a number as total": lambda owners: gradclip.clip_grads_with_norm_(owners, 0.5, 3.3),
    "clip_grad_value_": lambda owners: gradclip.clip_grad_value_(owners, 0.25),
    "scale_": lambda owners: gradclip.scale_([owner.grad for owner in owners], 0.3),
}


COMPLEX: dict[str, Call] = {
    "clip_": lambda owners: gradclip.clip_(owners, 0.5, scale=8.0),
    "two calls": two_calls,
    "a number as total": lambda owners: gradclip.clip_grads_with_norm_(owners, 0.5, 3.3),
    "one listed twice": lambda owners: gradclip.clip_([*owners, owners[0]], 0.5),
    "scale_": lambda owners: gradclip.scale_([owner.grad for owner in owners], 0.3),
}
SPARSE: dict[str, Call] = {
    "a Module": lambda module: gradclip.clip_(module, 0.5),
    "a list": lambda module: gradclip.clip_grad_norm_(list(module.parameters()), 0.5, 1.0),
    "named pairs": lambda module: gradclip.clip_(module.named_parameters(), 0.5),
    "a generator": lambda module: gradclip.clip_(module.parameters(), 0.5),
    "two calls": lambda module: two_calls(list(module.parameters())),
    "get_total_norm": lambda module: gradclip.get_total_norm([module[0].weight.grad]),
    "grad_norms": gradclip.grad_norms,
    "scale_": lambda module: gradclip.scale_([p.grad for p in module.parameters()], 0.3),
    "Clipper": lambda module: gradclip.Clipper(module, 0.5).clip_(),
    "clip_grads_with_norm_": lambda module: gradclip.clip_grads_with_norm_(module, 0.5, 3.0),
    "clip_grad_value_": lambda module: gradclip.clip_grad_value_(module, 0.25),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(False)


def model_gradients() -> list[torch.Tensor]:
    return [
        random_values((16, 8), torch.float32, seed=1),
        random_values(33, torch.bfloat16, seed=2),
        random_values((4, 6), torch.float32, seed=3).t(),
        random_values(5, torch.float64, seed=4),
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.filterwarnings("ignore")
def test_one_graph_with_the_eager_bits(backend: str, call: Call) -> None:
    eager, compiled = (parameters(g.clone() for g in model_gradients()) for _ in range(2))
    want = call(eager)
    graphed = torch.compile(call, backend=backend, fullgraph=True)
    result = graphed(compiled)
    assert (result is None) == (want is None)
    if want is not None:
        assert oracle.same_bits(result, want)
    for ours, other in zip(compiled, eager, strict=True):
        assert oracle.same_bits(gradient_of(ours), gradient_of(other))
    # the graph is used again, on other values
    for owner in (*compiled, *eager):
        gradient_of(owner).fill_(0.75)
    assert result is None or oracle.same_bits(graphed(compiled), call(eager))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore")
def test_forms_of_parameters(backend: str) -> None:
    for form in (lambda m: m, lambda m: list(m.named_parameters()), lambda m: m.parameters()):
        module = torch.nn.Linear(2, 1, bias=False)
        module.weight.grad = torch.tensor([[3.0, 4.0]])

        def clip(module: torch.nn.Module, form: Call = form) -> torch.Tensor:
            return gradclip.clip_(form(module), 2.5, eps=0.0)

        norm = torch.compile(clip, backend=backend, fullgraph=True)(module)
        assert norm.item() == 5.0
        (weight,) = module.parameters()
        assert gradient_of(weight).tolist() == [[1.5, 2.0]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore")
def test_two_calls_write_what_one_does(backend: str) -> None:
    for seed in range(8):
        gradient = random_values(100, torch.float32, seed=seed)
        one, two = (parameters([gradient.clone()]) for _ in range(2))
        gradclip.clip_(one, 0.5)
        torch.compile(two_calls, backend=backend, fullgraph=True)(two)
        assert oracle.same_bits(gradient_of(two[0]), gradient_of(one[0]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore")
def test_a_clipper(backend: str) -> None:
    eager, compiled = (parameters(g.clone() for g in model_gradients()) for _ in range(2))
    ours, other = gradclip.Clipper(compiled, 0.01), gradclip.Clipper(eager, 0.01)
    clip = torch.compile(lambda: ours.clip_(8.0), backend=backend, fullgraph=True)
    for is_clipped in (True, False):  # the second time only the scale divides
        assert oracle.same_bits(clip(), other.clip_(8.0))
        assert ours.coefficient == other.coefficient
        assert other.coefficient is not None
        assert (other.coefficient < 1) == is_clipped
    for one, two in zip(compiled, eager, strict=True):
        assert oracle.same_bits(gradient_of(one), gradient_of(two))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore")
def test_a_parameter_listed_twice(backend: str) -> None:
    (owner,) = parameters([torch.tensor([6.0, 8.0])])
    clip = torch.compile(
        lambda o: gradclip.clip_([o, o], 5.0, eps=0.0), backend=backend, fullgraph=True
    )
    assert clip(owner).item() == 10.0
    assert gradient_of(owner).tolist() == [3.0, 4.0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore")
def test_the_error_for_non_finite_totals(backend: str) -> None:
    (owner,) = parameters([torch.tensor([3.0, math.nan])])

    def clip(owners: list[torch.nn.Parameter]) -> torch.Tensor:
        return gradclip.clip_(owners, 1.0, error_if_nonfinite=True)

    with pytest.raises(RuntimeError, match="non-finite"):
        torch.compile(clip, backend=backend, fullgraph=True)([owner])
    assert gradient_of(owner)[0].item() == 3.0
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore")
def test_arithmetic_around_the_clip(backend: str) -> None:
    """Reads before the clip see the old gradient, reads after it the new one."""

    def step(owner: torch.nn.Parameter) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gradient = owner.grad
        assert gradient is not None
        before = gradient * 2
        norm = gradclip.clip_([owner], 2.5, eps=0.0)
        return before, gradient + 1, norm * 2

    (owner,) = parameters([torch.tensor([3.0, 4.0])])
    before, after, norm = torch.compile(step, backend=backend, fullgraph=True)(owner)
    assert (before.tolist(), after.tolist(), norm.item()) == ([6.0, 8.0], [2.5, 3.0], 10.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", COMPLEX.values(), ids=COMPLEX)
@pytest.mark.filterwarnings("ignore")
def test_complex_gradients(backend: str, call: Call) -> None:
    dtypes = [torch.complex64, torch.float32, torch.complex128]
    values = [random_values((3, 4), dtype, seed=seed) for seed, dtype in enumerate(dtypes)]
    eager, compiled = (parameters(value.clone() for value in values) for _ in range(2))
    want, result = call(eager), torch.compile(call, backend=backend, fullgraph=True)(compiled)
    assert (want is None and result is None) or oracle.same_bits(result, want)
    for ours, other in zip(compiled, eager, strict=True):
        assert oracle.same_bits(gradient_of(ours), gradient_of(other))


def embedding() -> torch.nn.Module:
    """A module with a sparse gradient that lists an index twice, and a dense one."""
    listed = random_values((3, 3), torch.float32, seed=1)
    rows = torch.tensor([[1, 1, 7]])
    table, dense = torch.nn.Embedding(10, 3, sparse=True), torch.nn.Linear(4, 1, bias=False)
    table.weight.grad = torch.sparse_coo_tensor(rows, listed, (10, 3))
    dense.weight.grad = random_values((1, 4), torch.float32, seed=2)
    return torch.nn.ModuleList([table, dense])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", SPARSE.values(), ids=SPARSE)
@pytest.mark.filterwarnings("ignore")
def test_sparse_gradients_break_the_graph(backend: str, call: Call) -> None:
    eager, compiled = embedding(), embedding()
    want, result = call(eager), torch.compile(call, backend=backend)(compiled)
    assert (want is None and result is None) or oracle.same_bits(result, want)
    for ours, other in zip(compiled.parameters(), eager.parameters(), strict=True):
        assert oracle.same_bits(gradient_of(ours), gradient_of(other))


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore")
def test_the_error_for_values_of_complex_gradients(backend: str, fullgraph: bool) -> None:
    owners = parameters([torch.tensor([3.0]), torch.tensor([3j])])
    clamp = torch.compile(
        lambda o: gradclip.clip_grad_value_(o, 1.0), backend=backend, fullgraph=fullgraph
    )
    with pytest.raises(TypeError, match=r"parameter 1 is torch.complex64, .* use gradclip\.clip_"):
        clamp(owners)
    assert [gradient_of(owner).item() for owner in owners] == [3.0, 3j]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore")
def test_the_error_for_raw_gradients(backend: str) -> None:
    clip = torch.compile(lambda t: gradclip.clip_grads_with_norm_(t, 1.0, 5.0), backend=backend)
    gradient = torch.tensor([3.0, 4.0])
    with pytest.raises(TypeError, match=r"parameter 0 is a plain tensor without \.grad"):
        clip([gradient])
    with pytest.raises(TypeError, match=r"`weight` is a plain tensor without \.grad"):
        clip([("weight", gradient)])
    assert gradient.tolist() == [3.0, 4.0]


OPERATORS: dict[str, tuple[Any, ...]] = {
    "clip_": ([2.0, 1.0, 1e-6, 1.0], [None] * 4, False, None),
    "total_norm": ([2.0], [None], False, torch.float64),
    "norms": ([True, False, True], [2.0], [None], None),
    "clip_with_norm_": ([1.0, 0.0, 1e-6], [None, torch.tensor(5.0), None]),
    "clamp_": ([0.5], [None]),
    "scale_": ([0.0], [torch.tensor(0.5)]),
    "factor": ([1.0, 0.0, 1e-6], [None, torch.tensor(5.0), None]),
    "refuse_complex": ([1.0], [None]),
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.filterwarnings("ignore")
def test_operators_keep_torchs_rules(name: str) -> None:
    gradients = [torch.tensor([3.0, 4.0]), torch.ones(2, 2, dtype=torch.bfloat16)]
    operator = getattr(torch.ops.gradclip, name).default
    results = torch.library.opcheck(operator, (gradients, *OPERATORS[name]))
    assert set(results.values()) == {"SUCCESS"}
