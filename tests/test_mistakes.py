"""What a new user passes by mistake is recognised, and what helps is named."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradclip
from tests.gradients import gradient_of

CLIPS: dict[str, Callable[[Any], Any]] = {
    "clip_": lambda parameters: gradclip.clip_(parameters, 1.0),
    "clip_grad_norm_": lambda parameters: gradclip.clip_grad_norm_(parameters, 1.0),
    "clip_grad_value_": lambda parameters: gradclip.clip_grad_value_(parameters, 0.1),
    "grad_norms": lambda parameters: gradclip.grad_norms(parameters),
    "Clipper": lambda parameters: gradclip.Clipper(parameters, 1.0),
}


def model() -> nn.Sequential:
    """Two layers with gradients of threes."""
    made = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    for parameter in made.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    return made


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters())


def tied(module: nn.Module) -> list[nn.Module]:
    return [module, module]


OF_OPTIMIZER = '[p for g in optimizer.param_groups for p in g["params"]]'

#: What is passed, what it is called, and what is to be passed instead.
MISTAKES: dict[str, tuple[Callable[[nn.Sequential], Any], str, str]] = {
    "optimizer": (adam, "an Adam, an optimizer", OF_OPTIMIZER),
    "param_groups": (lambda m: adam(m).param_groups, "dict at position 0", OF_OPTIMIZER),
    "a group": (lambda m: adam(m).param_groups[0], "a group of optimizer.param_groups", "params"),
    "its state": (lambda m: adam(m).state_dict(), "the state_dict of an optimizer", OF_OPTIMIZER),
    "optimizers": (lambda m: [adam(m)], "Adam at position 0", OF_OPTIMIZER),
    "state_dict": (lambda m: m.state_dict(), "a state_dict", "model.named_parameters()"),
    "dict": (lambda m: dict(m.named_parameters()), "a dict", ".items()"),
    "numbered": (lambda m: dict(enumerate(m.parameters())), "a dict", ".values()"),
    "modules": (tied, "Sequential at position 0", "[p for module in modules for p in module.param"),
    "named": (lambda m: m.named_children(), "Linear at position 0 as `0`", "named_parameters()"),
    "method": (lambda m: m.parameters, "a method that was not called", "model.parameters()"),
    "names": (lambda m: m.named_parameters, "a method that", "model.named_parameters()"),
    "class": (lambda m: nn.Linear, "the class Linear", "an instance"),
    "lists": (lambda m: [[*m.parameters()]], "list at position 0", "chain.from_iterable(lists)"),
    "generators": (lambda m: [m.parameters()], "generator at position 0", "one flat list"),
    "no gradient": (lambda m: [*m.parameters(), None], "NoneType at position 4", "leave out None"),
    "reversed": (lambda m: [(m[0].bias, "b")], "it is (Parameter, str)", "a string and a tensor"),
    "enumerate": (lambda m: enumerate(m.parameters()), "it is (int, Parameter)", "a string and a"),
    "scaler": (lambda m: torch.amp.GradScaler("cpu"), "a GradScaler", "such as model.named_para"),
}


@pytest.mark.parametrize("call", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize(("make", "named", "remedy"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(
    call: Callable[[Any], Any], make: Callable[[nn.Sequential], Any], named: str, remedy: str
) -> None:
    module = model()
    with pytest.raises(TypeError, match=r"^`parameters` ") as error:
        call(make(module))
    told = str(error.value)
    assert named in told
    assert remedy in told.split(named)[1]
    assert len(told) < 250
    assert "tensor(" not in told
    assert all(bool((gradient_of(p) == 3.0).all()) for p in module.parameters())


#: Expressions of remedies, and what they are about.
REMEDIES: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "optimizer": lambda m: {"optimizer": adam(m)},
    "param_groups": lambda m: {"optimizer": adam(m)},
    "state_dict": lambda m: {"model": m},
    "modules": lambda m: {"modules": list(m.children())},
    "named": lambda m: {"model": m},
    "method": lambda m: {"model": m},
}


@pytest.mark.parametrize("mistake", REMEDIES)
def test_the_remedy_that_is_named_helps(mistake: str) -> None:
    module, other = model(), model()
    with pytest.raises(TypeError) as error:
        gradclip.clip_(MISTAKES[mistake][0](module), 1.0)
    remedy = re.split(r"; pass ", str(error.value))[1].split(" (")[0]
    passed = eval(remedy, REMEDIES[mistake](module))
    assert gradclip.clip_(passed, 1.0) == gradclip.clip_(other, 1.0)
    ours, wanted = (list(map(gradient_of, each.parameters())) for each in (module, other))
    assert all(map(torch.equal, ours, wanted))


class Once:
    """An iterable that counts how often it is walked."""

    def __init__(self, entries: list[nn.Parameter]) -> None:
        self.entries = entries
        self.walks = 0

    def __iter__(self) -> Any:
        self.walks += 1
        return iter(self.entries)


def test_an_iterable_is_walked_once() -> None:
    module = model()
    once: Any = Once(list(module.parameters()))
    gradclip.clip_(once, 1.0)
    assert once.walks == 1


@pytest.mark.parametrize("form", ["module", "list", "generator", "iterator"])
def test_a_module_is_no_loss_scale(form: str) -> None:
    module = model()
    forms: dict[str, Any] = {
        "module": module,
        "list": list(module.parameters()),
        "generator": module.parameters(),
        "iterator": iter([*module.parameters()]),
    }
    clipper = gradclip.Clipper(module, 1.0)
    message = r"`scale` is a \w+, where a loss scale is expected; .* call clip_\(\), or clipper\("
    with pytest.raises(TypeError, match=message):
        clipper.clip_(forms[form])
    assert all(bool((gradient_of(p) == 3.0).all()) for p in module.parameters())
