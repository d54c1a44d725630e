"""Misspelt names of arguments and of functions are told from what there is."""

import contextlib
import importlib
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import nn

import gradclip
from gradclip import arguments

FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(gradclip, name)
    for name in gradclip.__all__
    if name not in ("scale_", "clip_grad_value_")
}
FUNCTIONS |= {"scale_": gradclip.scale_, "clip_grad_value_": gradclip.clip_grad_value_}
REQUIRED: dict[str, Any] = {
    "max_norm": 1.0,
    "clip_value": 1.0,
    "total_norm": 1.0,
    "coefficient": 1.0,
}


def owner() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 4.0)
    return parameter


def keywords(function: str, owned: nn.Parameter) -> dict[str, Any]:
    """Good values of the required arguments."""
    names = arguments.names_of(FUNCTIONS[function])
    given = {name: value for name, value in REQUIRED.items() if name in names}
    return {names[0]: [owned], **given}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_argument_misspelt(function: str) -> None:
    """Two letters swapped in any argument, required or not: the right one is named."""
    owned = owner()
    for name in arguments.names_of(FUNCTIONS[function]):
        if len(name) < 4 or (function, name) == ("clip_grad_norm_", "foreach"):
            continue
        given = keywords(function, owned)
        value = given.pop(name, None)
        misspelt = name[:-3] + name[-2] + name[-3] + name[-1]
        if misspelt == name:
            continue
        with pytest.raises(TypeError) as error:
            FUNCTIONS[function](**given, **{misspelt: value})
        told = str(error.value)
        # clip_grad_norm_ passes what it does not know to clip_, where all ranks hear of it
        refusing = told.partition("()")[0]
        assert refusing in (function, "clip_" if function == "clip_grad_norm_" else function)
        assert f"() got an unknown argument `{misspelt}`; did you mean `{name}`?" in told
        assert told.endswith(f"are {', '.join(arguments.names_of(FUNCTIONS[refusing]))}")
    assert owned.grad is not None
    assert owned.grad.tolist() == [4.0] * 3


@pytest.mark.parametrize(
    ("function", "name", "hint"),
    [
        ("clip_", "foreach", "; `foreach` can be dropped, as there is one implementation. Its"),
        ("Clipper", "foreach", "; `foreach` can be dropped, as there is one implementation. Its"),
        ("clip_", "max_grad_norm", "; did you mean `max_norm`? Its"),
        ("clip_", "clip_value", "; did you mean `max_norm`? Its"),
        ("clip_grad_value_", "clip_val", "; did you mean `clip_value`? Its"),
        ("clip_", "p", "; did you mean `norm_type`? Its"),
        ("get_total_norm", "ord", "; did you mean `norm_type`? Its"),
        ("clip_", "loss_scale", "; did you mean `scale`? Its"),
        ("grad_norms", "process_group", "; did you mean `group`? Its"),
        ("clip_", "MAX_NORM", "; did you mean `max_norm`? Its"),
        ("explain", "zzz", "`zzz`. Its"),
    ],
)
def test_names_of_other_libraries(function: str, name: str, hint: str) -> None:
    with pytest.raises(TypeError) as error:
        FUNCTIONS[function](**keywords(function, owner()), **{name: 1.0})
    assert f"{function}() got an unknown argument `{name}`" in str(error.value)
    assert hint in str(error.value)


def test_what_is_missing_or_doubled_is_told_by_python() -> None:
    clip: Any = gradclip.clip_
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'max_norm'"):
        clip([owner()])
    with pytest.raises(TypeError, match="multiple values for argument 'max_norm'"):
        clip([owner()], 1.0, max_norm=1.0)


def test_grad_mode_survives_a_refusal() -> None:
    clip: Any = gradclip.clip_
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            for passed in ({"max_nrom": 1}, {"parameters": 1, "max_norm": 2}, {}):
                with contextlib.suppress(TypeError):
                    clip(**(passed or keywords("clip_", owner())))
                assert torch.is_grad_enabled() == enabled


def test_known_arguments_pass() -> None:
    arguments.refuse_unknown("clip_", {}, ["max_norm"])
    arguments.refuse_unknown("clip_", {"max_norm": 1, "eps": 2}, ["eps", "max_norm"])


@hypothesis.given(st.lists(st.text(min_size=1)), st.text())
def test_suggestions_are_of_what_is_known(known: list[str], name: str) -> None:
    told = arguments.suggestion(name, known)
    assert told == "" or told in {f"; did you mean `{each}`?" for each in known}
    if name in known:
        assert told != ""


def test_only_public_names_are_shown() -> None:
    shown = {name for name in dir(gradclip) if not name.startswith("__")}
    assert shown == {*gradclip.__all__, "sharding"}
    for name in shown:
        assert getattr(gradclip, name) is not None


@pytest.mark.parametrize(
    ("name", "near"),
    [("clip", "clip_"), ("norms", "grad_norms"), ("clipper", "Clipper"), ("explian", "explain")],
)
def test_modules_do_not_stand_for_functions(name: str, near: str) -> None:
    message = f"'gradclip' has no attribute '{name}'; did you mean `{near}`"
    with pytest.raises(AttributeError, match=message):
        getattr(gradclip, name)


def test_modules_can_be_imported() -> None:
    for name in ("clip", "value", "norms", "clipper", "explain", "engine", "sharding.clip"):
        module = importlib.import_module(f"gradclip.{name}")
        assert inspect.ismodule(module)
    for function in FUNCTIONS.values():
        assert pickle.loads(pickle.dumps(function)) is function
    code = (
        "import gradclip.clip, gradclip; from gradclip import engine, clip; "
        "import gradclip.engine as other; assert other is engine; "
        "from gradclip.sharding import ShardedClipError; assert not hasattr(gradclip, 'engine')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
