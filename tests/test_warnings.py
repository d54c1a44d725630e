"""Warnings: torch's where a function has torch's name, our own elsewhere, at the caller's line."""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import utils

import gradclip
from gradclip import notices
from tests.gradients import gradient_of, parameters

EMPTY_GENERATOR = "`parameters` is an empty generator, no gradient clipping will occur."
Call = Callable[[Any, Any], Any]


def exhausted() -> Iterator[torch.nn.Parameter]:
    generator = torch.nn.Linear(2, 2).parameters()
    for _ in generator:
        pass
    return generator


EMPTIES: dict[str, Callable[[], Any]] = {
    "exhausted generator": exhausted,
    "empty generator": lambda: (owner for owner in list[torch.nn.Parameter]()),
    "list": list,
    "tuple": tuple,
    "iterator": lambda: iter(()),
    "dict values": lambda: {}.values(),
    "without gradients": lambda: [torch.nn.Parameter(torch.ones(2))],
    "a parameter without gradient": lambda: torch.nn.Parameter(torch.ones(2)),
    "a generator without gradients": lambda: torch.nn.Linear(2, 2).parameters(),
}

TORCHS: dict[str, Call] = {
    "clip_grad_norm_": lambda module, owners: module.clip_grad_norm_(owners, 1.0),
    "get_total_norm": lambda module, owners: module.get_total_norm(
        owner.grad for owner in owners if owner.grad is not None
    ),
    "clip_grads_with_norm_": lambda module, owners: module.clip_grads_with_norm_(
        owners, 1.0, torch.tensor(2.0)
    ),
    "clip_grad_value_": lambda module, owners: module.clip_grad_value_(owners, 1.0),
}


def warned(call: Callable[[], Any]) -> list[tuple[str, str]]:
    """The warnings of a call and the files they are attributed to."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [(str(warning.message), warning.filename) for warning in caught]


@pytest.mark.parametrize("empty", EMPTIES)
@pytest.mark.parametrize("name", TORCHS)
def test_torchs_names_warn_where_torch_does(name: str, empty: str) -> None:
    def call(module: Any) -> None:
        owners = EMPTIES[empty]()
        if isinstance(owners, torch.Tensor) and name == "get_total_norm":
            owners = [owners]
        if module is utils and name == "clip_grad_value_":  # torch refuses to limit nothing
            with pytest.raises(RuntimeError, match="nested_tensorlist"):
                TORCHS[name](module, owners)
        else:
            TORCHS[name](module, owners)

    ours, theirs = warned(lambda: call(gradclip)), warned(lambda: call(utils))
    assert ours == theirs
    expected = name == "clip_grad_norm_" and empty.endswith("y generator")
    is_spent = name == "clip_grad_norm_" and empty == "exhausted generator"
    assert ours == ([(EMPTY_GENERATOR, __file__)] if expected or is_spent else [])


def test_torchs_sentence_at_the_line_of_the_call() -> None:
    line = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match="empty generator") as caught:
        gradclip.clip_grad_norm_(exhausted(), 1.0)
    assert [(str(w.message), w.filename, w.lineno) for w in caught] == [
        (EMPTY_GENERATOR, __file__, line)
    ]


OWN: dict[str, Callable[[Any], Any]] = {
    "clip_": lambda owners: gradclip.clip_(owners, 1.0),
    "grad_norms": gradclip.grad_norms,
}


@pytest.mark.parametrize("wrapper", ["none", "no_grad", "inference_mode", "enable_grad"])
@pytest.mark.parametrize("name", OWN)
def test_own_warnings_at_the_line_of_the_caller(name: str, wrapper: str) -> None:
    function: Any = getattr(gradclip, name)
    call = function if wrapper == "none" else getattr(torch, wrapper)()(function)
    arguments = (1.0,) if name == "clip_" else ()
    empties: list[Any] = [[], exhausted(), {}.values()]
    for nothing in empties:
        line = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]
        with pytest.warns(UserWarning, match="no gradient is read") as caught:
            call(nothing, *arguments)
        assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line)]


def test_parameters_without_gradients_warn_in_clip_and_clipper() -> None:
    without = [torch.nn.Parameter(torch.ones(2))]
    clipper = gradclip.Clipper(without, 1.0)
    for call in (lambda: gradclip.clip_(without, 1.0), clipper.clip_, clipper):
        ((message, file),) = warned(call)
        assert message.startswith("no parameter has a gradient")
        assert file == __file__


BACKENDS = ["eager", "aot_eager", "inductor"]
IN_GRAPHS = {
    "clip_ without gradients": (lambda owners: gradclip.clip_(owners, 1.0), "no parameter has"),
    "clip_ of nothing": (lambda owners: gradclip.clip_(owners[1:], 1.0), "no gradient is read"),
    "clip_ of a generator": (
        lambda owners: gradclip.clip_((o for o in owners[1:]), 1.0),
        "no gradient is read",
    ),
    "grad_norms of nothing": (lambda owners: gradclip.grad_norms(owners[1:]), "no gradient is"),
    "torch's of a generator": (
        lambda owners: gradclip.clip_grad_norm_((o for o in owners[1:]), 1.0),
        EMPTY_GENERATOR,
    ),
}


def without_result(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def step(owners: Any) -> torch.Tensor:
        call(owners)
        return torch.ones(2) * 2

    return step


@pytest.mark.parametrize("is_returned", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("call", "message"), IN_GRAPHS.values(), ids=IN_GRAPHS)
def test_graphs_warn_at_every_call(
    call: Callable[[Any], Any], message: str, backend: str, is_returned: bool
) -> None:
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(False)
    step = call if is_returned else without_result(call)
    owners = [torch.nn.Parameter(torch.ones(2))]
    graphed = torch.compile(step, backend=backend, fullgraph=True)
    for _ in range(3):
        found = [(text, file) for text, file in warned(lambda: graphed(owners)) if "grad" in text]
        ((text, file),) = found
        assert message in text
        assert file == __file__


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TORCHS)
def test_graphs_of_torchs_names_are_silent_without_gradients(name: str, backend: str) -> None:
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(False)
    call = TORCHS[name]
    graphed = torch.compile(lambda o: call(gradclip, o), backend=backend, fullgraph=True)
    without = [torch.nn.Parameter(torch.ones(2))]
    for owners in (without, without[1:]):
        call_again = functools.partial(graphed, owners)
        assert [text for text, _ in warned(call_again) if "grad" in text] == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_clipper_warns(backend: str) -> None:
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(False)
    clipper = gradclip.Clipper([torch.nn.Parameter(torch.ones(2))], 1.0)
    graphed = torch.compile(lambda: clipper.clip_(), backend=backend, fullgraph=True)
    texts = [text for text, _ in warned(graphed) if "grad" in text]
    assert texts == [notices.NO_GRADIENT]


def test_gradients_that_come_later_are_clipped_in_the_same_function() -> None:
    torch._dynamo.reset()
    graphed = torch.compile(lambda o: gradclip.clip_(o, 2.5, eps=0.0), fullgraph=True)
    owners = [torch.nn.Parameter(torch.ones(2))]
    warned(lambda: graphed(owners))
    (other,) = parameters([torch.tensor([3.0, 4.0])])
    assert graphed([other]).item() == 5.0
    assert gradient_of(other).tolist() == [1.5, 2.0]
