"""A Clipper over its life: before the first clip, when a Module changes, when a list is left."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import stateful
from torch import nn

import gradclip
from gradclip.sources import ListSource, ModuleSource
from tests import oracle
from tests.gradients import gradient_of, parameter, parameters


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.ModuleDict({"a": nn.Linear(3, 1, bias=False)}))


def fill(module: nn.Module, value: float = 3.0) -> None:
    for each in module.parameters():
        each.grad = torch.full_like(each, value)


@pytest.mark.parametrize(
    ("nothing", "words"),
    [
        (list, "holds nothing to clip; an empty list"),
        (lambda: iter(()), "holds nothing to clip; an empty tuple_iterator"),
        (lambda: nn.ReLU().parameters(), "holds nothing to clip; an empty or exhausted generator"),
        (lambda: nn.ReLU(), "holds nothing to clip; ReLU has no parameters"),
        (lambda: exhausted(), r"is an exhausted generator; call model.parameters\(\) again"),
    ],
)
def test_a_clipper_of_nothing(nothing: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"`parameters` {words}"):
        gradclip.Clipper(nothing(), 1.0)


def exhausted() -> Iterator[nn.Parameter]:
    generator = model().parameters()
    list(generator)
    return generator


def ignore(vector: torch.Tensor, operation: str) -> None:
    """The reduction of a world of one."""


def test_a_rank_without_parameters_is_no_mistake() -> None:
    with pytest.warns(UserWarning, match="an empty list: no gradient is read"):
        assert gradclip.Clipper([], 1.0, reduce=ignore).clip_().item() == 0.0
    with pytest.raises(ValueError, match="exhausted generator"):
        gradclip.Clipper(exhausted(), 1.0, reduce=ignore)


def test_before_the_first_clip() -> None:
    owner = parameter(torch.tensor([3.0, 4.0]))
    clipper = gradclip.Clipper([owner], 2.5, eps=0.0)
    assert (clipper.total_norm, clipper.coefficient) == (None, None)
    clipper.clip_()
    assert clipper.total_norm is not None
    assert (clipper.total_norm.item(), clipper.coefficient) == (5.0, 0.5)


@pytest.mark.parametrize("limit", [torch.tensor(2.5), torch.tensor([2.5]).double()])
def test_a_limit_in_a_tensor(limit: torch.Tensor) -> None:
    owner = parameter(torch.tensor([3.0, 4.0]))
    clipper = gradclip.Clipper([owner], limit, eps=0.0)
    assert clipper.max_norm == 2.5
    clipper.max_norm = limit / 2
    clipper.clip_()
    assert (clipper.coefficient, gradient_of(owner).tolist()) == (0.25, [0.75, 1.0])


def test_repr() -> None:
    module = model()
    assert repr(gradclip.Clipper(module, 1)) == (
        "Clipper(Sequential, 3 parameters, max_norm=1.0, norm_type=2.0)"
    )
    clipper = gradclip.Clipper(
        list(module.parameters())[:1],
        torch.tensor(0.5),
        "inf",
        error_if_nonfinite=True,
        dtype=torch.float64,
        reduce=ignore,
        plain="distinct",
    )
    assert repr(clipper) == (
        "Clipper(1 parameter, max_norm=0.5, norm_type=inf, error_if_nonfinite=True, "
        "dtype=torch.float64, reduce=the function ignore, plain='distinct')"
    )
    clipper.max_norm = torch.ones(())
    assert "max_norm=a tensor of shape ()" in repr(clipper)


# A Module that changes


def grown(module: nn.Sequential) -> None:
    module.append(nn.Linear(1, 4))


def adapted(module: nn.Sequential) -> None:
    module[0].adapter = nn.Linear(2, 2)


def loaded(module: nn.Sequential) -> None:
    state = {name: value.clone() for name, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def replaced(module: nn.Sequential) -> None:
    module[0].weight = nn.Parameter(torch.ones(5))


def swapped(module: nn.Sequential) -> None:
    module[0].weight.data, module[0].weight.grad = torch.ones(2, 2), None


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "append": grown,
    "a layer in a leaf": adapted,
    "load_state_dict": loaded,
    "an attribute": replaced,
    "another shape": swapped,
    "a layer less": lambda module: module.pop(1),
    "a weight less": lambda module: delattr(module[0], "weight"),
    "None": lambda module: setattr(module[0], "bias", None),
    "float64": lambda module: module.double(),
    "to_empty": lambda module: module.to_empty(device="cpu"),
    "nothing": lambda module: None,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_module_is_followed(change: Callable[[nn.Sequential], object], route: str) -> None:
    module, other = model(), model()
    clipper = gradclip.Clipper(module, 0.5)
    fill(module)
    clipper.clip_()
    for each in (module, other):
        change(each)
        fill(each, 7.0)
    assert oracle.same_bits(clipper.clip_(), gradclip.clip_(other, 0.5))
    for ours, wanted in zip(module.parameters(), other.parameters(), strict=True):
        assert oracle.same_bits(gradient_of(ours), gradient_of(wanted))


def test_errors_name_parameters_as_they_are_now() -> None:
    module = model()
    clipper = gradclip.Clipper(module, 0.5, error_if_nonfinite=True)
    fill(module)
    module.append(nn.Linear(1, 1, bias=False))
    gradient = torch.tensor([[torch.nan]])
    module[2].weight.grad = gradient
    with pytest.raises(RuntimeError, match=r"gradient of `2\.weight` holds 1 NaN of 1 elements"):
        clipper.clip_()


def test_a_followed_module_over_ranks() -> None:
    module = model()
    seen: list[int] = []
    clipper = gradclip.Clipper(
        module,
        0.5,
        reduce=lambda vector, operation: seen.append(vector.numel()),
        replicas=lambda name, owner: "distinct",
    )
    fill(module)
    clipper.clip_()
    grown(module)
    fill(module)
    other = copy.deepcopy(module)
    fill(other)
    assert clipper.clip_().item() == gradclip.clip_(other, 0.5).item()
    assert all(map(torch.equal, *(map(gradient_of, each.parameters()) for each in (module, other))))
    assert len(seen) == 2
    del module[0].weight
    clipper.sharding["replicas"] = {"0.weight": "distinct"}
    before = [gradient_of(owner).clone() for owner in module.parameters()]
    with pytest.raises(RuntimeError, match=r"`replicas` holds '0\.weight', which is not"):
        clipper.clip_()
    assert all(map(torch.equal, before, map(gradient_of, module.parameters())))
    clipper.sharding["replicas"] = {"2.weight": "distinct"}
    clipper.clip_()


def test_a_module_that_becomes_empty_warns() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    clipper = gradclip.Clipper(module, 1.0)
    module.pop(0)
    with pytest.warns(UserWarning, match="Sequential has no parameters: no gradient"):
        assert clipper.clip_().item() == 0.0


class Selective(nn.Module):
    """Lists some of its parameters, by its own rule."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1), nn.Linear(1, 1)
        self.chosen = "first"

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from getattr(self, self.chosen).named_parameters(*args, **kwargs)


class Hiding(nn.Sequential):
    """Shows only as many children as it says."""

    shown = 1

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        listed = list(super().named_modules(*args, **kwargs))
        return iter(listed[: 1 + self.shown])


@pytest.mark.parametrize("nested", [False, True])
def test_modules_that_list_parameters_their_own_way(nested: bool) -> None:
    selective = Selective()
    source = ModuleSource(selective)
    assert names(source) == ["weight", "bias"]
    selective.chosen = "second"
    assert source.current().tensors[0] is selective.second.weight
    hiding = Hiding(nn.Linear(1, 1), nn.Linear(1, 1, bias=False))
    module = nn.Sequential(hiding) if nested else hiding
    source = ModuleSource(module)
    hiding.shown = 2
    assert names(source) == [name for name, _ in module.named_parameters()]
    assert len(names(source)) == 3


def names(source: ModuleSource) -> list[str]:
    return source.current().names or []


def test_a_parameter_whose_class_changes() -> None:
    """`swap_tensors` keeps the object and changes what it is."""
    module = nn.Linear(2, 2)
    source = ModuleSource(module)
    assert source.current().are_plain
    fancy = nn.Parameter(torch.ones(2, 2).as_subclass(Fancy))
    before = module.weight
    torch.utils.swap_tensors(module.weight, fancy)
    assert module.weight is before
    assert not source.current().are_plain


class Fancy(torch.Tensor):
    pass


def layer(kind: int) -> nn.Module:
    made: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(2, 2),
        lambda: nn.Linear(1, 1, bias=False),
        lambda: nn.ReLU(),
        lambda: nn.Sequential(nn.LayerNorm(2), nn.ReLU()),
        lambda: nn.ParameterList([nn.Parameter(torch.ones(2))]),
    ]
    return made[kind]()


class Edits(stateful.RuleBasedStateMachine):
    """A Module under random edits, beside a listing from scratch."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(1, 1)))
        self.source = ModuleSource(self.module)

    def any_module(self, draw: int) -> nn.Module:
        found = list(self.module.modules())
        return found[draw % len(found)]

    def any_owner(self, draw: int) -> tuple[nn.Module, str] | None:
        found = [
            (module, name)
            for module in self.module.modules()
            for name, owner in module._parameters.items()
            if owner is not None
        ]
        return found[draw % len(found)] if found else None

    @stateful.rule(where=st.integers(0, 99), kind=st.integers(0, 4), name=st.sampled_from("abc"))
    def add(self, where: int, kind: int, name: str) -> None:
        setattr(self.any_module(where), name, layer(kind))

    @stateful.rule(where=st.integers(0, 99))
    def remove(self, where: int) -> None:
        module = self.any_module(where)
        for name in list(module._modules)[-1:]:
            delattr(module, name)

    @stateful.rule(where=st.integers(0, 99), other=st.integers(0, 99))
    def move(self, where: int, other: int) -> None:
        module, target = self.any_module(where), self.any_module(other)
        for name in list(module._modules)[:1]:
            child = module._modules.pop(name)
            inside = child is not None and any(each is target for each in child.modules())
            if not inside:
                target._modules[name] = child

    @stateful.rule(where=st.integers(0, 99))
    def assign(self, where: int) -> None:
        if owner := self.any_owner(where):
            setattr(owner[0], owner[1], nn.Parameter(torch.ones(2)))

    @stateful.rule(where=st.integers(0, 99), other=st.integers(0, 99))
    def tie(self, where: int, other: int) -> None:
        one, two = self.any_owner(where), self.any_owner(other)
        if one and two:
            setattr(one[0], one[1], getattr(*two))

    @stateful.rule(where=st.integers(0, 99), name=st.sampled_from("wxyz"))
    def rename(self, where: int, name: str) -> None:
        if owner := self.any_owner(where):
            held = getattr(*owner)
            delattr(*owner)
            owner[0].register_parameter(name, held)

    @stateful.rule(where=st.integers(0, 99))
    def reorder(self, where: int) -> None:
        owned = self.any_module(where)._parameters
        for name in list(owned)[:1]:
            owned[name] = owned.pop(name)

    @stateful.rule(where=st.integers(0, 99))
    def drop(self, where: int) -> None:
        if owner := self.any_owner(where):
            setattr(owner[0], owner[1], None)

    @stateful.rule(where=st.integers(0, 99))
    def freeze(self, where: int) -> None:
        if owner := self.any_owner(where):
            getattr(*owner).requires_grad_(False)

    @stateful.rule(future=st.booleans(), dtype=st.sampled_from([torch.float32, torch.float64]))
    def convert(self, future: bool, dtype: torch.dtype) -> None:
        torch.__future__.set_overwrite_module_params_on_conversion(future)
        self.module.to(dtype)
        torch.__future__.set_overwrite_module_params_on_conversion(False)

    @stateful.rule()
    def load(self) -> None:
        state = {name: value.clone() for name, value in self.module.state_dict().items()}
        self.module.load_state_dict(state, assign=True)

    @stateful.rule()
    def buffer(self) -> None:
        self.module.register_buffer("running", torch.ones(1))

    @stateful.invariant()
    def is_listed_as_from_scratch(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a Module without parameters
            given = self.source.current()
        fresh = list(self.module.named_parameters())
        assert (given.names or []) == [name for name, _ in fresh]
        assert list(map(id, given.tensors)) == [id(owner) for _, owner in fresh]
        assert self.source.current() is given


TestEdits = Edits.TestCase
TestEdits.settings = hypothesis.settings(max_examples=150, stateful_step_count=12, deadline=None)


def test_an_unchanged_module_is_not_listed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module = model()
    source = ModuleSource(module)
    first = source.current()
    fill(module)
    module[0].weight.data = torch.zeros(3, 2)
    module.eval()

    def refuse(*_: object) -> None:
        raise AssertionError("listed again")

    monkeypatch.setattr(nn.Module, "_named_members", refuse)
    for _ in range(3):
        assert source.current() is first


# A list that is left


def left_list(hold: str) -> tuple[Any, Any]:
    """A Clipper of the parameters of a Module that has others by now, and who still holds them."""
    module = model()
    listed = list(module.parameters())
    holders: dict[str, Callable[[], Any]] = {
        "nobody": lambda: None,
        "a list": lambda: listed[-1:],
        "an optimizer": lambda: torch.optim.SGD(listed[:1], lr=0.1),
        "a graph": lambda: (listed[0] * 2).sum(),
        "the module": lambda: module,
    }
    holder = holders[hold]()
    clipper = gradclip.Clipper([*listed, listed[0]], 1.0)
    fill(module)
    if hold != "the module":
        loaded(module)
    return clipper, holder


@pytest.mark.parametrize("hold", ["nobody", "a list", "an optimizer", "a graph", "the module"])
def test_a_list_that_nobody_else_holds(hold: str) -> None:
    clipper, holder = left_list(hold)
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        clipper.clip_()
    told = [str(each.message) for each in caught]
    assert all(each.filename == __file__ for each in caught)
    if hold == "nobody":
        (only,) = told
        assert "only this Clipper still holds its parameters" in only
        assert "make a new Clipper, or make it of the Module, which it then follows" in only
    else:
        assert told == []
        assert holder is not None


def test_a_module_that_nobody_else_holds() -> None:
    module = model()
    fill(module)
    clipper = gradclip.Clipper(module, 1.0)
    clipper.clip_()
    del module
    gc.collect()
    with pytest.warns(UserWarning, match="only this Clipper still holds its Module"):
        clipper.clip_()


def test_a_list_whose_parameters_are_unused() -> None:
    owners = parameters([torch.ones(2)])
    clipper = gradclip.Clipper(owners, 1.0)
    clipper.clip_()
    owners[0].grad = None
    with pytest.warns(UserWarning, match="make a new Clipper if the model has other parameters"):
        clipper.clip_()


def test_a_clipper_is_no_leak() -> None:
    module = model()
    clippers = [gradclip.Clipper(module, 1.0), gradclip.Clipper([*module.parameters()], 1.0)]
    vars(module)["clippers"] = clippers  # a cycle through the snapshot
    gone: list[weakref.ref[Any]] = [weakref.ref(module), *map(weakref.ref, module.parameters())]
    replaced_weight = weakref.ref(module[0].weight)
    clippers.pop()
    replaced(module)
    fill(module)
    clippers[0].clip_()
    gc.collect()
    assert replaced_weight() is None
    del module, clippers
    gc.collect()
    assert all(each() is None for each in gone)


def test_the_source_of_a_list_is_that_list() -> None:
    owners = parameters([torch.ones(2)])
    source = ListSource(owners)
    assert source.current() is source.listed
    assert source.listed.tensors == tuple(owners)


# The norms of a Module with their names


def test_norms_by_name() -> None:
    """The recipe of the docstring of `grad_norms`."""
    module = model()
    module[0].weight.grad = torch.full((3, 2), 2.0)
    module[0].bias.grad = torch.zeros(3)
    norms = gradclip.grad_norms(module, dtype=torch.float64).tolist()
    by_name = {
        name: norm
        for (name, owner), norm in zip(module.named_parameters(), norms, strict=True)
        if owner.grad is not None
    }
    assert by_name == {"0.weight": oracle.total_norm([torch.full((6,), 2.0)]), "0.bias": 0.0}
    assert norms[2] == 0.0


def test_norms_of_a_list_with_repeats() -> None:
    one, two = parameters([torch.tensor([3.0, 4.0]), torch.tensor([2.0])])
    assert gradclip.grad_norms([two, one, two]).tolist() == [2.0, 5.0, 2.0]
    assert gradclip.grad_norms([("b", two), ("a", one)]).tolist() == [2.0, 5.0]
