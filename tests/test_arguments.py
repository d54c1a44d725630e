"""Bad input is refused before anything is written, with a message that names what was wrong."""

import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake

import gradclip
from gradclip import arguments
from gradclip.describe import described
from tests import oracle
from tests.gradients import gradient_of, parameter, parameters

Call = Callable[[Any], Any]


def refused(call: Call, owners: Any, error: type[Exception], message: str) -> None:
    """Asserts an error, and that no gradient changed by a bit."""
    holders = [owner[1] if isinstance(owner, tuple) else owner for owner in owners]
    before = [gradient_of(owner).clone() for owner in holders if owner.grad is not None]
    with pytest.raises(error, match=message):
        call(owners)
    after = [gradient_of(owner) for owner in holders if owner.grad is not None]
    assert all(oracle.same_bits(a, b) for a, b in zip(after, before, strict=True))


def ordinary() -> list[torch.nn.Parameter]:
    return parameters([torch.tensor([3.0, 4.0]), torch.ones(5, dtype=torch.bfloat16)])


CLIPS: list[Callable[[Any, Any], Any]] = [
    lambda owners, limit: gradclip.clip_(owners, limit),
    lambda owners, limit: gradclip.clip_grad_norm_(owners, limit),
    lambda owners, limit: gradclip.clip_grads_with_norm_(owners, limit, torch.tensor(5.0)),
]


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("limit", [-1.0, math.nan, -math.inf, "-2", torch.tensor(-1.0)])
def test_max_norm(clip: Callable[[Any, Any], Any], limit: Any, route: str) -> None:
    message = rf"`max_norm` is {float(limit)}; expected a number >= 0"
    refused(lambda owners: clip(owners, limit), ordinary(), ValueError, message)


@pytest.mark.parametrize("limit", [-0.5, math.nan])
def test_clip_value(limit: float, route: str) -> None:
    message = rf"`clip_value` is {limit}; expected a number >= 0"
    refused(lambda o: gradclip.clip_grad_value_(o, limit), ordinary(), ValueError, message)


@pytest.mark.parametrize(
    "call",
    [
        lambda owners: gradclip.clip_(owners, 1.0, math.nan),
        lambda owners: gradclip.clip_grad_norm_(owners, 1.0, math.nan),
        lambda owners: gradclip.get_total_norm(map(gradient_of, owners), math.nan),
        lambda owners: gradclip.grad_norms(owners, math.nan),
    ],
)
def test_norm_type(call: Call, route: str) -> None:
    refused(call, ordinary(), ValueError, "`norm_type` is nan; pass a number such as")


@pytest.mark.parametrize("total", [-1.0, -math.inf, torch.tensor(-1.0)])
def test_total_norm(total: float | torch.Tensor, route: str) -> None:
    def call(owners: Any) -> None:
        gradclip.clip_grads_with_norm_(owners, 1.0, total)

    message = rf"`total_norm` is {float(total)}; expected a norm >= 0"
    refused(call, ordinary(), ValueError, message)


@pytest.mark.parametrize("eps", [-1e-6, math.nan, math.inf])
def test_eps(eps: float) -> None:
    refused(lambda o: gradclip.clip_(o, 1.0, eps=eps), ordinary(), ValueError, f"`eps` is {eps}")


@pytest.mark.parametrize("scale", [0.0, -8.0, math.nan, math.inf, 1e46, 2.0**127, 1e-40])
def test_loss_scale(scale: float) -> None:
    message = f"`scale` is {re.escape(str(scale))}; expected a positive finite loss scale"
    refused(lambda o: gradclip.clip_(o, 1.0, scale=scale), ordinary(), ValueError, message)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.int32,
        torch.complex64,
        torch.bool,
        torch.float8_e8m0fnu,
        *([torch.float4_e2m1fn_x2] if hasattr(torch, "float4_e2m1fn_x2") else []),
    ],
)
def test_dtype_of_the_result(dtype: torch.dtype) -> None:
    message = rf"`dtype` is {dtype}; expected a floating dtype"
    refused(lambda o: gradclip.clip_(o, 1.0, dtype=dtype), ordinary(), TypeError, message)


def test_coefficient() -> None:
    tensor = torch.ones(3)
    with pytest.raises(ValueError, match=r"`coefficient` has shape \(2,\); expected a number"):
        gradclip.scale_([tensor], torch.ones(2))
    assert tensor.tolist() == [1.0] * 3


CALLS: dict[str, Call] = {
    "clip_": lambda owners: gradclip.clip_(owners, 1.0),
    "clip_grad_norm_": lambda owners: gradclip.clip_grad_norm_(owners, 1.0),
    "clip_grads_with_norm_": lambda o: gradclip.clip_grads_with_norm_(o, 1.0, torch.tensor(9.0)),
    "clip_grad_value_": lambda owners: gradclip.clip_grad_value_(owners, 0.5),
    "grad_norms": lambda owners: gradclip.grad_norms(owners),
    "explain": lambda owners: gradclip.explain(owners),
}


def integer() -> torch.Tensor:
    return torch.tensor([3, 4])


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


UNSUPPORTED: list[tuple[Callable[[], torch.Tensor], str]] = [
    (integer, "torch.int64"),
    (lambda: torch.tensor([True]), "torch.bool"),
    (quantized, "torch.qint8"),
]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(("make", "dtype"), UNSUPPORTED)
@pytest.mark.filterwarnings("ignore:.*quantiz.*")
def test_gradients_without_a_norm(
    call: Call, make: Callable[[], torch.Tensor], dtype: str, route: str
) -> None:
    gradient = make()
    bad = torch.nn.Parameter(gradient.clone(), requires_grad=False)
    bad.grad = gradient
    good = ordinary()
    message = f"gradient of `layer.weight` is {dtype}; expected a floating or complex dtype"
    named = [("first", good[0]), ("layer.weight", bad), ("last", good[1])]
    with pytest.raises(TypeError, match=message):
        call(iter(named))
    with pytest.raises(TypeError, match=f"gradient of parameter 1 is {dtype}"):
        call([good[0], bad])
    assert gradient_of(good[0]).tolist() == [3.0, 4.0]
    assert gradient_of(good[1]).tolist() == [1.0] * 5


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.filterwarnings("ignore:.*beta state")
def test_a_layout_without_a_norm(call: Call, route: str) -> None:
    bad = torch.nn.Parameter(torch.eye(3).to_sparse_csr(), requires_grad=False)
    bad.grad = torch.eye(3).to_sparse_csr()
    with pytest.raises(TypeError, match=r"gradient of parameter 0 .*layout torch.sparse_csr"):
        call([bad])


def overlapping() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    storage = torch.arange(1.0, 13.0)
    yield storage[:6], storage[5:]
    yield storage[::2], storage[::3]
    yield storage.view(3, 4), storage.view(3, 4)[1:2, 1:3]
    yield storage, storage.view(torch.int32)[4:8].view(torch.float32)
    yield storage[:1], storage.view(torch.bfloat16)[1:2]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("index", range(5))
def test_gradients_that_share_memory(call: Call, index: int, route: str) -> None:
    first, second = list(overlapping())[index]
    named = list(zip("ab", parameters([first, second]), strict=True))
    for pairs in (named, named[::-1]):
        names = [name for name, _ in pairs]
        message = f"gradients of `{names[0]}` and `{names[1]}` share memory.*clone"
        refused(call, pairs, ValueError, message)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_gradient_that_overlaps_itself(call: Call, route: str) -> None:
    windows = torch.arange(1.0, 9.0).as_strided((5, 3), (1, 1))
    refused(call, [("w", parameter(windows))], ValueError, "gradient of `w` .*overlap")


def test_neighbours_that_interleave_are_no_overlap() -> None:
    storage = torch.tensor([3.0, 4.0, 0.0, 0.0])
    owners = parameters([storage[::2], storage[1::2]])
    assert gradclip.clip_(owners, 2.5, eps=0.0).item() == 5.0
    assert storage.tolist() == [1.5, 2.0, 0.0, 0.0]


@pytest.mark.parametrize("form", [list, lambda tensors: tensors[0], iter])
def test_raw_gradients_instead_of_parameters(form: Callable[..., Any], route: str) -> None:
    raw = [torch.tensor([3.0, 4.0])]
    with pytest.raises(TypeError, match=r"parameter 0 is a plain tensor without \.grad"):
        gradclip.clip_grads_with_norm_(form(raw), 1.0, torch.tensor(5.0))
    assert raw[0].tolist() == [3.0, 4.0]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_entries_that_are_no_tensors(call: Call) -> None:
    good = ordinary()
    for bad, kind in ((None, "NoneType"), (1.0, "float"), ("weight", "str")):
        with pytest.raises(TypeError, match=f"`parameters` holds {kind} at position 1"):
            call([good[0], bad])
    assert gradient_of(good[0]).tolist() == [3.0, 4.0]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("bad", [None, 1, "weight"])
def test_what_is_no_list(call: Call, bad: Any) -> None:
    with pytest.raises(TypeError, match=f"`parameters` is {bad!r}; expected a Module"):
        call(bad)


def test_a_module_is_not_scaled() -> None:
    module = torch.nn.Linear(1, 1)
    before = [weight.clone() for weight in module.parameters()]
    with pytest.raises(TypeError, match="`tensors` is a Linear, whose weights"):
        gradclip.scale_(module, 0.5)
    assert all(map(torch.equal, module.parameters(), before))


def test_a_missing_attribute_is_no_missing_gradient() -> None:
    owners = ordinary()
    with pytest.raises((AttributeError, ValueError), match="main_gard"):
        gradclip.clip_(owners, 1.0, grad="main_gard")


def test_complex_values_have_no_order(route: str) -> None:
    bad = parameter(torch.tensor([3 + 4j]))
    named = [("first", ordinary()[0]), ("wave", bad)]
    message = "gradient of `wave` is torch.complex64, which has no order"
    refused(lambda o: gradclip.clip_grad_value_(o, 1.0), named, TypeError, message)


@pytest.mark.parametrize("entry", [("a", 1.0), ("a", None)])
def test_pairs_without_tensors(entry: tuple[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"`parameters` holds .* at position 0 as `a`"):
        gradclip.clip_([entry], 1.0)


@pytest.mark.parametrize("limit", ["1.0", 1, torch.tensor(1.0), torch.tensor(1.0).double()])
def test_limits_that_are_numbers_in_other_clothes(limit: Any) -> None:
    owner = parameter(torch.tensor([3.0, 4.0]))
    assert gradclip.clip_([owner], limit, "2").item() == 5.0  # type: ignore[arg-type]
    assert gradient_of(owner).tolist() == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("name", ["max_norm", "total_norm", "coefficient"])
def test_several_numbers_where_one_is_wanted(name: str) -> None:
    several: Any = torch.ones(2)
    owner = torch.nn.Parameter(torch.zeros(2))
    owner.grad = torch.tensor([3.0, 4.0])
    calls: dict[str, Callable[[], object]] = {
        "max_norm": lambda: gradclip.clip_([owner], several),
        "total_norm": lambda: gradclip.clip_grads_with_norm_([owner], 1.0, several),
        "coefficient": lambda: gradclip.scale_([gradient_of(owner)], several),
    }
    with pytest.raises(ValueError, match=rf"`{name}` has shape \(2,\); expected a number"):
        calls[name]()
    assert gradient_of(owner).tolist() == [3.0, 4.0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_gradients_are_refused() -> None:
    owner = torch.nn.Parameter(torch.zeros(2))
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(TypeError, match="layout nested; expected strided or sparse COO"):
        gradclip.get_total_norm([nested, owner])


class Broken:
    """Raises at every look that is not at its type."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __float__(self) -> float:
        raise self.error("no number")

    def __bool__(self) -> bool:
        raise self.error("no truth")

    def __repr__(self) -> str:
        raise self.error("no repr")


class Interrupted(BaseException):
    pass


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(())


#: What is passed for a number, the kind of error, and how it is described; None where it is read.
NUMBERS: dict[str, tuple[Callable[[], Any], type[Exception] | None, str]] = {
    "a large int": (lambda: 10**400, ValueError, "an int of about 401 digits"),
    "an int without a repr": (lambda: 10**5000, ValueError, "an int of about 5001 digits"),
    "a large fraction": (lambda: Fraction(10**400), ValueError, "a Fraction"),
    "KeyError": (lambda: Broken(KeyError), TypeError, "a Broken, whose conversion raises KeyError"),
    "OverflowError": (lambda: Broken(OverflowError), ValueError, "a Broken"),
    "StopIteration": (lambda: Broken(StopIteration), TypeError, "a Broken, whose conversion"),
    "UnicodeError": (lambda: Broken(UnicodeError), TypeError, "a Broken"),
    "None": (lambda: None, TypeError, "None"),
    "a string": (lambda: "x" * 1000, ValueError, "'" + "x" * 40 + "'..."),
    "a surrogate": (lambda: "\udcff", ValueError, r"'\\udcff'"),
    "bytes": (lambda: b"x", TypeError, "b'x'"),
    "a complex": (lambda: 1j, TypeError, "1j"),
    "a complex scalar of numpy": (lambda: numpy.complex64(1 + 2j), TypeError, "a complex64"),
    "a complex tensor": (lambda: torch.tensor(1j), TypeError, r"a tensor of shape \(\)"),
    "a meta tensor": (
        lambda: torch.ones((), device="meta"),
        TypeError,
        r"a tensor of shape \(\) on meta",
    ),
    "a fake tensor": (fake, TypeError, r"a tensor of shape \(\)"),
    "a list": (lambda: [2.0], TypeError, "a list"),
    "a module": (lambda: torch.nn.Linear(1, 1), TypeError, "a Linear"),
    "a class": (lambda: torch.nn.Linear, TypeError, "the class Linear"),
    "a function": (lambda: ordinary, TypeError, "the function ordinary"),
    "an array": (lambda: numpy.ones(3), TypeError, "a ndarray"),
    "two": (lambda: 2, None, ""),
    "True": (lambda: True, None, ""),
    "a number in a string": (lambda: "2", None, ""),
    "float64 of numpy": (lambda: numpy.float64(2), None, ""),
    "float16 of numpy": (lambda: numpy.float16(2), None, ""),
    "int8 of numpy": (lambda: numpy.int8(2), None, ""),
    "a fraction": (lambda: Fraction(5, 2), None, ""),
    "a decimal": (lambda: Decimal("2.5"), None, ""),
    "a tensor": (lambda: torch.tensor([2], dtype=torch.int8), None, ""),
    "a parameter": (lambda: torch.nn.Parameter(torch.tensor(2.0)), None, ""),
    "a bfloat16": (lambda: torch.tensor(2.0, dtype=torch.bfloat16), None, ""),
}

TAKERS: dict[str, Callable[[Any, Any], Any]] = {
    "max_norm": lambda owners, value: gradclip.clip_(owners, value),
    "norm_type": lambda owners, value: gradclip.clip_(owners, 1.0, value),
    "eps": lambda owners, value: gradclip.clip_(owners, 1.0, eps=value),
    "scale": lambda owners, value: gradclip.clip_(owners, 1.0, scale=value),
    "clip_value": lambda owners, value: gradclip.clip_grad_value_(owners, value),
    "total_norm": lambda owners, value: gradclip.clip_grads_with_norm_(owners, 1.0, value),
    "coefficient": lambda owners, value: gradclip.scale_(map(gradient_of, owners), value),
}


@pytest.mark.parametrize("name", TAKERS)
@pytest.mark.parametrize(("make", "error", "described"), NUMBERS.values(), ids=NUMBERS)
def test_every_number(
    name: str, make: Callable[[], Any], error: type[Exception] | None, described: str
) -> None:
    """A number is read as float() reads it; all else is refused by name."""
    value = make()
    if name == "scale" and value is None:
        return  # no scale
    if name in ("coefficient", "total_norm") and "meta" in described:
        return  # stays on its device
    call = TAKERS[name]
    if error is not None:
        remedy = "expected a (finite )?number"
        message = f"^`{name}` is {described}[^;]*; {remedy}"
        if name == "coefficient" and is_fake(value):
            message = "^`coefficient` is a fake tensor, which holds no value; pass a number"
        refused(lambda owners: call(owners, value), ordinary(), error, message)
        return
    ours, other = ordinary(), ordinary()
    plain = float(value.detach() if isinstance(value, torch.Tensor) else value)
    assert same_results(call(ours, value), call(other, plain))
    assert all(map(torch.equal, map(gradient_of, ours), map(gradient_of, other)))


def same_results(one: Any, other: Any) -> bool:
    return one is other is None or oracle.same_bits(one, other)


@pytest.mark.parametrize("name", TAKERS)
def test_an_interrupt_is_left_alone(name: str) -> None:
    with pytest.raises(Interrupted):
        TAKERS[name](ordinary(), Broken(Interrupted))


@pytest.mark.parametrize("name", ["max_norm", "norm_type", "eps"])
def test_attributes_of_a_clipper_are_read_anew(name: str) -> None:
    owners = ordinary()
    clipper = gradclip.Clipper(owners, 1.0)
    setattr(clipper, name, Broken(KeyError))
    message = f"`{name}` is a Broken, whose conversion raises KeyError"
    refused(lambda _: clipper.clip_(), owners, TypeError, message)


def test_a_grad_scaler_is_no_scale() -> None:
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=8.0)
    message = r"`scale` is a GradScaler; pass scaler.get_scale\(\); before scaler.step"
    refused(lambda o: gradclip.clip_(o, 1.0, scale=scaler), ordinary(), TypeError, message)
    owners, other = ordinary(), ordinary()
    gradclip.clip_(owners, 1.0, scale=scaler.get_scale())
    gradclip.clip_(other, 1.0, scale=8.0)
    assert all(map(torch.equal, map(gradient_of, owners), map(gradient_of, other)))


FLAGS: list[tuple[Any, bool]] = [
    (1, True),
    (0, False),
    (None, False),
    (numpy.bool_(True), True),
    (torch.tensor(False), False),
]


@pytest.mark.parametrize(("value", "is_set"), FLAGS)
def test_equal_arguments_give_equal_settings(value: Any, is_set: bool) -> None:
    ours = arguments.settings(-0.0, -0.0, -0.0, 1, value)
    assert ours == arguments.settings(0.0, 0.0, 0.0, None, is_set)
    assert repr(ours) == repr(arguments.settings(0.0, 0.0, 0.0, None, is_set))


@pytest.mark.parametrize(
    ("value", "described"), [("False", "'False'"), (Broken(KeyError), "a Broken")]
)
def test_what_is_neither_true_nor_false(value: Any, described: str) -> None:
    def call(owners: Any) -> None:
        gradclip.clip_(owners, 1.0, error_if_nonfinite=value)

    message = f"`error_if_nonfinite` is {described}; expected True or False"
    refused(call, ordinary(), TypeError, message)


@hypothesis.given(st.floats(allow_nan=False), st.floats(0.0, allow_infinity=False))
def test_settings_keep_every_float(p: float, number: float) -> None:
    settings = arguments.settings(p, number, number)
    assert settings[:3] == (p, number, number)
    assert math.copysign(1.0, settings.max_norm) == 1.0
    assert settings.norm_type != 0 or math.copysign(1.0, settings.norm_type) == 1.0


@pytest.mark.parametrize("value", ["float32", float, Broken(KeyError), 32])
def test_what_is_no_dtype(value: Any) -> None:
    message = f"`dtype` is {described(value)}; expected a floating dtype of single numbers"
    refused(lambda o: gradclip.clip_(o, 1.0, dtype=value), ordinary(), TypeError, message)


@pytest.mark.parametrize("value", [b"grad", Broken(KeyError), None])
def test_what_is_no_name_of_an_attribute(value: Any) -> None:
    message = f"`grad` is {described(value)}; expected the name"
    refused(lambda o: gradclip.clip_(o, 1.0, grad=value), ordinary(), TypeError, message)


@hypothesis.given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.integers(), inner),
    )
)
def test_descriptions_are_short(value: Any) -> None:
    assert 0 < len(described(value)) <= 250
    assert "\n" not in described(value)
    assert described(value).encode()
