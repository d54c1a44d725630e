"""One table of unusual gradients and surroundings, and what becomes of them, on both routes.

`values`: the engine and torch operations give what they give for plain tensors in plain
surroundings. Otherwise the error and its words; then not a bit has changed, earlier gradients
included.
"""

import contextlib
import ctypes
import ctypes.util
import math
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import gradclip
from tests import oracle
from tests.gradients import parameters

VALUES = [torch.tensor([12.0]), torch.tensor([3.0, -4.0, 0.1], dtype=torch.bfloat16)]
FE_UPWARD = {"x86_64": 0x800, "aarch64": 0x400000}

Make = Callable[[Tensor], Tensor]


class NoCopy(Tensor):
    """Refuses to be written by `copy_`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            raise NotImplementedError("no copy_ here")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class NoDispatch(Tensor):
    """A wrapper whose operations do not reach its elements."""

    elements: Tensor

    @staticmethod
    def __new__(cls, elements: Tensor) -> "NoDispatch":
        make: Any = Tensor._make_wrapper_subclass
        made: NoDispatch = make(cls, elements.shape, dtype=elements.dtype)
        made.elements = elements
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["elements"], None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} is not for me")


def inference(values: Tensor) -> Tensor:
    with torch.inference_mode():
        return values.clone()


def dual(values: Tensor) -> Tensor:
    made: Tensor = forward_ad.make_dual(values.clone(), torch.ones_like(values))
    return made


@contextlib.contextmanager
def rounding_upward() -> Iterator[None]:
    mode = FE_UPWARD.get(platform.machine())
    name = ctypes.util.find_library("m")
    if mode is None or name is None:
        pytest.skip("needs fesetround")
    library = ctypes.CDLL(name)
    library.fesetround(mode)
    try:
        assert 1.0 + 2.0**-60 > 1.0, "the mode is on"
        yield
        assert 1.0 + sum([2.0**-60]) > 1.0, "and stays the caller's"
    finally:
        library.fesetround(0)


@contextlib.contextmanager
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@dataclass
class Case:
    make: Make = Tensor.clone
    during: Callable[[], Any] = contextlib.nullcontext
    read: tuple[type[Exception], str] | None = None
    """What reading raises; None for values."""
    written: tuple[type[Exception], str] | None = None
    """What writing raises; as `read` by default."""
    around: Callable[[], Any] = contextlib.nullcontext
    """What the gradients are made in, too."""
    values: list[Tensor] = field(default_factory=lambda: VALUES)

    @property
    def refusal(self) -> tuple[type[Exception], str] | None:
        return self.written or self.read


TABLE = {
    "plain": Case(),
    "inference tensors": Case(inference),
    "in inference mode": Case(during=torch.inference_mode),
    "forward-mode duals": Case(
        dual,
        around=forward_ad.dual_level,
        read=(TypeError, "gradient of parameter 1 carries a forward-mode tangent"),
    ),
    "in a dual level": Case(around=forward_ad.dual_level),
    "rounding upward": Case(during=rounding_upward),
    "rounding upward, many": Case(
        during=rounding_upward,
        values=[torch.randn(999, dtype=d) / 3 for d in (torch.float64, torch.float32)],
    ),
    "subnormals flushed": Case(
        during=flushing, values=[torch.tensor([1e-40, 3e-39]), torch.tensor([-7e-45])]
    ),
    "real under a fake mode": Case(
        during=FakeTensorMode,
        read=(TypeError, "gradient of parameter 0 is a real tensor under FakeTensorMode"),
    ),
    "a subclass without copy_": Case(
        lambda values: values.clone().as_subclass(NoCopy),
        written=(TypeError, r"parameter 1`? is a NoCopy, which cannot be written .*no copy_ here"),
    ),
    "a wrapper without operations": Case(
        NoDispatch,
        read=(TypeError, "parameter 1`? is a NoDispatch, which cannot be (read|written)"),
    ),
    "an efficient zero tensor": Case(
        lambda values: torch._efficientzerotensor(values.shape),
        read=(ValueError, r"parameter 1 has elements but no memory; .*`.clone\(\)`"),
    ),
}


def owner(gradient: Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.main_grad = gradient  # type: ignore[attr-defined]
    return parameter


@pytest.fixture(params=TABLE)
def case(request: pytest.FixtureRequest) -> Case:
    return TABLE[request.param]


READS: dict[str, Callable[[list[Any], list[Tensor]], Any]] = {
    "get_total_norm": lambda _, tensors: gradclip.get_total_norm(tensors),
    "p = 1": lambda _, tensors: gradclip.get_total_norm(tensors, 1.0),
    "p = 3": lambda _, tensors: gradclip.get_total_norm(tensors, 3.0),
    "p = 1e-20": lambda _, tensors: gradclip.get_total_norm(tensors, 1e-20),
    "grad_norms": lambda owners, _: gradclip.grad_norms(owners, grad="main_grad"),
}
WRITES: dict[str, Callable[[list[Any], list[Tensor]], Any]] = {
    "clip_": lambda owners, _: gradclip.clip_(owners, 0.5, grad="main_grad"),
    "clip_ with a scale": lambda owners, _: gradclip.clip_(
        owners, 9.0, scale=3.0, grad="main_grad"
    ),
    "clip_grads_with_norm_": lambda owners, _: gradclip.clip_grads_with_norm_(
        owners, 0.7, 13.0, grad="main_grad"
    ),
    "clip_grad_value_": lambda owners, _: gradclip.clip_grad_value_(owners, 0.3, grad="main_grad"),
    "scale_": lambda _, tensors: gradclip.scale_(tensors, 0.3),
}


def held(tensor: Any) -> Tensor:
    """The elements themselves, whatever they are wrapped in."""
    if isinstance(tensor, NoDispatch):
        return tensor.elements
    with torch._C.DisableTorchFunctionSubclass():
        return torch.empty(0) if tensor._is_zerotensor() else tensor.detach().clone()


def gradients(case: Case) -> list[Tensor]:
    first, *rest = case.values
    return [first.clone(), *map(case.make, rest)]


def plain_result(call: Callable[..., Any], values: list[Tensor]) -> tuple[Any, list[Tensor]]:
    tensors = [value.clone() for value in values]
    return call([owner(tensor) for tensor in tensors], tensors), tensors


@pytest.mark.parametrize("name", [*READS, *WRITES])
def test_table(case: Case, name: str, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = (READS | WRITES)[name]
    with monkeypatch.context() as reference:
        reference.setenv("GRADCLIP_FUSED", "1")
        want, kept = plain_result(call, case.values)
    refusal = case.read if name in READS else case.refusal
    with case.around():
        tensors = gradients(case)
        before = [held(tensor).clone() for tensor in tensors]
        owners = [owner(tensor) for tensor in tensors]
        if refusal is not None:
            with case.during(), pytest.raises(refusal[0], match=refusal[1]):
                call(owners, tensors)
            assert all(map(oracle.same_bits, map(held, tensors), before))
            return
        with case.during():
            found = call(owners, tensors)
        assert all(map(oracle.same_bits, map(held, tensors), kept))
    assert found is want or oracle.same_bits(found, want)


def test_a_model_in_the_place_of_gradients(route: str) -> None:
    for call in (gradclip.get_total_norm, lambda model: gradclip.scale_(model, 0.5)):
        with pytest.raises(TypeError, match="`tensors` is a Linear, whose weights would be"):
            call(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("make", [lambda: torch.ones((), device="meta"), "fake"])
def test_numbers_without_a_value(make: Any, route: str) -> None:
    if make == "fake":
        with FakeTensorMode():
            number: Any = torch.ones(())
    else:
        number = make()
    gradient = torch.tensor([3.0, 4.0])
    for call, name in (
        (lambda: gradclip.clip_grads_with_norm_(parameters([gradient]), 1.0, number), "total_norm"),
        (lambda: gradclip.scale_([gradient], number), "coefficient"),
        (lambda: gradclip.clip_(parameters([gradient]), number), "max_norm"),
    ):
        with pytest.raises(TypeError, match=f"`{name}` is "):
            call()
    assert gradient.tolist() == [3.0, 4.0]
    if make != "fake":
        meta = torch.ones(2, device="meta")
        gradclip.clip_grads_with_norm_(parameters([meta]), 1.0, number)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_of_half_precision(route: str) -> None:
    half, plain = torch.tensor([3 + 4j, 0j], dtype=torch.complex32), torch.tensor([12.0])
    assert gradclip.get_total_norm([half, plain], 1.0).item() == 17.0
    assert gradclip.get_total_norm([half, plain], math.inf).item() == 12.0
    assert gradclip.clip_(parameters([half, plain]), 1.0).item() == 13.0
    factor = oracle.coefficient(13.0, 1.0)
    want = oracle.scaled(torch.tensor([3.0, 4.0], dtype=torch.float16), factor)
    assert torch.view_as_real(half)[0].tolist() == want.tolist()
    assert oracle.same_bits(plain, oracle.scaled(torch.tensor([12.0]), factor))
    with pytest.raises(TypeError, match=r"is torch\.complex32, which has no order"):
        gradclip.clip_grad_value_(parameters([plain, half]), 1.0)
