"""Layouts, containers, empty lists and mixes that implementations elsewhere got wrong."""

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import gradclip
from gradclip import _core
from tests import oracle
from tests.gradients import gradient_of, parameter, parameters, random_values, total

COEFFICIENT = 0.6
"""Of `scale_`, as a number and as a tensor."""


@pytest.mark.parametrize(
    ("p", "wanted"),
    [(1.0, 9.0), (2.0, 5.385164807134504), (3.0, 4.626065009182742)],
)
def test_two_tensors_of_small_integers(p: float, wanted: float, route: str) -> None:
    assert total([torch.tensor([3.0, -4.0]), torch.tensor([2.0])], p) == wanted


def padded(values: torch.Tensor, padding: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A view of `values` inside storage that is `padding` on both sides, and that storage."""
    storage = torch.full((len(values) + 11,), padding, dtype=values.dtype)
    view = storage[3 : 3 + len(values)]
    view.copy_(values)
    return view, storage


def padding_of(storage: torch.Tensor) -> torch.Tensor:
    return torch.cat([storage[:3], storage[-8:]])


@pytest.mark.parametrize(
    "dtypes", list(itertools.product([torch.bfloat16, torch.float32], repeat=2))
)
@pytest.mark.parametrize("padding", [7.0, math.nan, math.inf])
@pytest.mark.parametrize("max_norm", [0.125, 1e9])
def test_mixed_dtypes_in_both_orders_with_padding(
    dtypes: tuple[torch.dtype, torch.dtype], padding: float, max_norm: float, route: str
) -> None:
    views, storages = zip(
        *(padded(torch.full((128,), 1 / 64, dtype=dtype), padding) for dtype in dtypes), strict=True
    )
    before = [storage.clone() for storage in storages]
    norm = gradclip.clip_(parameters(views), max_norm, dtype=torch.float64)
    assert norm.item() == 0.25
    for view, storage, old in zip(views, storages, before, strict=True):
        want = oracle.clipped(torch.full_like(view, 1 / 64), 0.25, max_norm)
        assert oracle.same_bits(view, want)
        assert oracle.same_bits(padding_of(storage), padding_of(old))


@pytest.mark.parametrize("lengths", [(1, 127), (13, 129), (128, 3), (1021, 515)])
@pytest.mark.parametrize("attribute", ["grad", "decoupled_grad"])
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_lengths_that_no_vector_divides(
    lengths: tuple[int, int], attribute: str, max_norm: float, route: str
) -> None:
    values = [
        random_values(lengths[0], torch.bfloat16, seed=1),
        random_values(lengths[1], torch.float32, seed=2),
    ]
    for order in (values, values[::-1]):
        pairs = [padded(value, 5.0) for value in order]
        owners = [torch.nn.Parameter(torch.zeros(len(value))) for value in order]
        for owner, (view, _) in zip(owners, pairs, strict=True):
            setattr(owner, attribute, view if attribute != "grad" else None)
        if attribute == "grad":
            owners = parameters(view for view, _ in pairs)
        norm = gradclip.clip_(owners, max_norm, grad=attribute, dtype=torch.float64).item()
        assert norm == oracle.total_norm(order)
        for value, (view, storage) in zip(order, pairs, strict=True):
            assert oracle.same_bits(view, oracle.clipped(value, norm, max_norm))
            assert (padding_of(storage) == 5.0).all()


def test_only_the_named_attribute_is_clipped() -> None:
    owner = parameter(torch.tensor([3.0, 4.0]))
    owner.decoupled_grad = torch.tensor([6.0, 8.0])  # type: ignore[attr-defined]
    assert gradclip.clip_([owner], 5.0, eps=0.0, grad="decoupled_grad").item() == 10.0
    assert owner.decoupled_grad.tolist() == [3.0, 4.0]  # type: ignore[attr-defined]
    assert gradient_of(owner).tolist() == [3.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_zero_gradients_inside_other_values(dtype: torch.dtype, route: str) -> None:
    view, storage = padded(torch.zeros(130, dtype=dtype), 3.0)
    assert gradclip.clip_([parameter(view)], 1.0).item() == 0
    assert (view == 0).all()
    assert (padding_of(storage) == 3.0).all()


def test_nothing_is_written_below_the_limit(route: str) -> None:
    """A signalling NaN's bits would not survive a multiplication by 1; here inf is the limit."""
    bits = torch.tensor([0x7F800001, 1, 0x3F800000], dtype=torch.int32)
    owner = parameter(bits.clone().view(torch.float32))
    gradclip.clip_([owner], math.inf)
    assert torch.equal(gradient_of(owner).view(torch.int32), bits)


def test_a_norm_just_below_the_limit_is_left_alone(route: str) -> None:
    gradient = torch.tensor([0.6, 0.8]) * (1 - 2e-6)
    owner = parameter(gradient.clone())
    gradclip.clip_([owner], 1.0)
    assert oracle.same_bits(gradient_of(owner), gradient)
    owner = parameter(torch.tensor([0.0, 1.0]))
    gradclip.clip_([owner], 1.0)  # the 1e-6 in the denominator: torch clips here too
    assert gradient_of(owner)[1].item() == pytest.approx(1 / (1 + 1e-6), rel=1e-7)
    assert gradient_of(owner)[1].item() != 1.0


@pytest.mark.parametrize(
    "coefficient", [COEFFICIENT, torch.tensor(COEFFICIENT, dtype=torch.float64)]
)
def test_scale_takes_numbers_and_tensors(coefficient: float | torch.Tensor, route: str) -> None:
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    values = [random_values(1025, dtype, seed=4) for dtype in dtypes]
    tensors = [value.clone() for value in values]
    gradclip.scale_(tensors, coefficient)
    for tensor, value in zip(tensors, values, strict=True):
        assert oracle.same_bits(tensor, oracle.scaled(value, COEFFICIENT))
    one = [value.clone() for value in values]
    gradclip.scale_(one, 1.0)
    gradclip.scale_(one, torch.tensor(1.0))
    assert all(oracle.same_bits(a, b) for a, b in zip(one, values, strict=True))


def test_scale_by_more_than_one_and_by_nothing(route: str) -> None:
    tensor = torch.tensor([1.5, -2.0])
    gradclip.scale_(tensor, 4)
    assert tensor.tolist() == [6.0, -8.0]
    gradclip.scale_([tensor], 0.0)
    assert oracle.same_bits(tensor, torch.tensor([0.0, -0.0]))


def test_a_loss_scale_is_divided_out(route: str) -> None:
    for limit in (1.0, math.inf):
        owner = parameter(torch.tensor([3.0, 4.0], dtype=torch.float64) * 1024)
        assert gradclip.clip_([owner], limit, scale=1024.0, eps=0.0).item() == 5.0
        want = [0.6, 0.8] if limit == 1.0 else [3.0, 4.0]
        assert gradient_of(owner).tolist() == pytest.approx(want, rel=1e-15)


@pytest.mark.parametrize("p", [0.0, 1.0, 3.0, -1.0, math.inf, -math.inf])
def test_norms_under_a_loss_scale_are_those_without(p: float, route: str) -> None:
    gradient = torch.tensor([3.0, -4.0, 12.0])
    scaled = parameter(gradient * 4096)
    norm = gradclip.clip_([scaled], math.inf, p, scale=4096.0, dtype=torch.float64)
    assert norm.item() == total([gradient], p)
    assert gradient_of(scaled).tolist() == gradient.tolist()


def spent() -> Iterator[torch.nn.Parameter]:
    yield from ()


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.0, -1.0, math.inf, -math.inf])
def test_nothing_to_clip_is_zero_and_a_warning(p: float, route: str) -> None:
    for nothing in ([], spent(), [torch.nn.Parameter(torch.ones(2))], torch.nn.Identity()):
        with pytest.warns(UserWarning, match="no gradient is read|clip_") as caught:
            norm = gradclip.clip_(nothing, 1.0, p)
        assert (norm.item(), norm.dim(), norm.dtype) == (0.0, 0, torch.float32)
        assert caught[0].filename == __file__


def test_nothing_to_clip_on_the_parameters_device() -> None:
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        norm = gradclip.clip_([torch.nn.Parameter(torch.ones(2, device="meta"))], 1.0)
    assert norm.device.type == "meta"


def test_other_calls_with_nothing_to_do() -> None:
    without = torch.nn.Parameter(torch.ones(2))
    gradclip.clip_grad_value_([without], 1.0)
    gradclip.clip_grads_with_norm_([without], 1.0, torch.tensor(2.0))
    assert gradclip.grad_norms([without]).tolist() == [0.0]
    assert without.tolist() == [1.0, 1.0]
    assert without.grad is None
    for empty in (iter(()), spent()):
        assert gradclip.get_total_norm(empty).item() == 0.0


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.0, 0.5, math.inf])
def test_empty_tensors_beside_others(p: float, route: str) -> None:
    gradients = [torch.zeros(0), torch.tensor([3.0, -4.0]), torch.zeros(5, 0, 2)]
    assert total(gradients, p) == total(gradients[1:2], p)
    assert total(gradients[:1], p) == 0.0


def test_the_smallest_magnitude_ignores_empty_tensors(route: str) -> None:
    assert total([torch.zeros(0), torch.tensor([3.0, -4.0])], -math.inf) == 3.0
    assert total([torch.zeros(0)], -math.inf) == 0.0


def test_one_parameter_listed_twice_counts_and_scales_once(route: str) -> None:
    owner = parameter(torch.tensor([6.0, 8.0]))
    assert gradclip.clip_([owner, owner], 5.0, eps=0.0).item() == 10.0
    assert gradient_of(owner).tolist() == [3.0, 4.0]
    norms = gradclip.grad_norms([owner, owner])
    assert norms.tolist() == [5.0, 5.0]


@pytest.mark.parametrize("end", [[], [torch.zeros(0)], [torch.tensor([3.0]).to_sparse()]])
def test_parameters_listed_twice_beside_a_known_plan(end: list[torch.Tensor], route: str) -> None:
    """The second call finds the plan of the first: nothing of it may count again."""
    first, second = parameter(torch.tensor([6.0])), parameter(torch.tensor([8.0]))
    rest = [parameter(gradient) for gradient in end]
    expected = oracle.total_norm([torch.tensor([6.0, 8.0]), *(t.to_dense() for t in end)], 2)
    for listed in (
        [first, second, *rest],
        [first, second, *rest, *rest],
        [first, first, second, *rest],
        [first, second, first, *rest, second],
        [first, second, *rest, first],
    ):
        total_norm = gradclip.clip_(listed, math.inf, dtype=torch.float64)
        assert total_norm.item() == expected, [id(p) for p in listed]


def test_gradients_behind_a_property(route: str) -> None:
    """A class that says what `grad` is goes before torch's own."""

    class Scaled(torch.nn.Parameter):
        @property
        def grad(self) -> torch.Tensor:  # type: ignore[override]
            return self.held  # type: ignore[attr-defined, no-any-return]

    owner = Scaled(torch.zeros(2))
    owner.held = torch.tensor([3.0, 4.0])  # type: ignore[attr-defined]
    assert gradclip.clip_([owner], 1.0, eps=0.0).item() == 5.0
    assert owner.grad.tolist() == [pytest.approx(0.6), pytest.approx(0.8)]


def test_gradients_that_are_made_anew_at_each_reading(route: str) -> None:
    """Their memory says nothing about which parameter they are of."""

    class Wide(torch.nn.Parameter):
        @property
        def main_grad(self) -> torch.Tensor:
            return self.narrow_grad.float()  # type: ignore[attr-defined, no-any-return]

    def wide(value: float) -> Wide:
        owner = Wide(torch.zeros(5000))
        owner.narrow_grad = torch.full((5000,), value, dtype=torch.bfloat16)  # type: ignore[attr-defined]
        return owner

    first, second = wide(3.0), wide(4.0)
    for listed in ([first, second], [first, first], [first, second, first]) * 3:
        expected = oracle.total_norm([owner.main_grad for owner in dict.fromkeys(listed)], 2)
        total_norm = gradclip.clip_(listed, math.inf, grad="main_grad", dtype=torch.float64)
        assert total_norm.item() == expected


def test_empty_gradients_listed_twice_count_once(route: str) -> None:
    one, two = parameter(torch.zeros(0)), parameter(torch.zeros(0))
    owner = parameter(torch.tensor([3.0]))
    for listed in ([one, two, owner], [one, one, owner]):
        core = _core.Gradients.of(tuple(listed), "grad", None)
        assert len(core) == len(dict.fromkeys(listed))
        assert isinstance(core.tensors, tuple), "nobody may take away what the core reads"


@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 5, 3)])
def test_expanded_gradients(shape: tuple[int, ...], route: str) -> None:
    base = torch.tensor([[2.0]]) if len(shape) != 1 else torch.tensor(2.0)
    gradient = base.expand(shape)
    count = math.prod(shape)
    owner = parameter(gradient)
    for p in (0.0, 1.0, 2.0, 3.0, math.inf, -math.inf):
        assert total([gradient], p) == oracle.total_norm([gradient], p)
    norm = gradclip.clip_([owner], 1.0).item()
    assert norm == pytest.approx(math.sqrt(4 * count))
    assert gradient.unique().tolist() == [pytest.approx(2 / math.sqrt(4 * count), rel=1e-5)]


def test_expanding_to_a_count_beyond_32_bits(route: str) -> None:
    gradient = torch.tensor([1.5, -0.5]).unsqueeze(1).expand(2, 2**40)
    assert total([gradient], 1.0) == 2.0**41
    assert total([gradient], 0.0) == 2.0**41
    assert total([gradient]) == oracle.nearest_root((10 << 2 * 1073) << 40, 2)


LAYOUTS = {
    "transposed": lambda x: x.t(),
    "every second": lambda x: x[:, ::2],
    "every second row": lambda x: x[::2],
    "column": lambda x: x[:, 5],
    "block": lambda x: x[3:17, 2:9],
    "channels last": lambda x: x.reshape(4, 5, 4, 10).to(memory_format=torch.channels_last),
    "three strided dimensions": lambda x: x.view(4, 5, 4, 10)[::2, ::2, :, ::3],
    "permuted and cut": lambda x: x.view(4, 5, 4, 10).permute(3, 1, 0, 2)[1:7, :, ::2],
    "0-dim": lambda x: x[7, 7],
    "as strided": lambda x: x.as_strided((6, 3, 2), (60, 9, 4), 11),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_layouts(layout: str, dtype: torch.dtype, route: str) -> None:
    base = random_values((20, 40), dtype, spread=5, seed=9)
    view = LAYOUTS[layout](base)
    inside = torch.zeros(base.shape, dtype=torch.bool)
    LAYOUTS[layout](inside).fill_(True)
    if view.data_ptr() < base.data_ptr() or layout == "channels last":
        base, inside = view, torch.ones(view.shape, dtype=torch.bool)
    old, outside = view.clone(), base[~inside].clone()
    norm = gradclip.clip_([parameter(view)], 0.07, dtype=torch.float64).item()
    assert norm == oracle.total_norm([old]) > 0.07
    assert oracle.same_bits(view, oracle.clipped(old, norm, 0.07))
    assert oracle.same_bits(base[~inside], outside)


def test_conjugated_and_negated_views(route: str) -> None:
    base = random_values(33, torch.complex128, seed=6)
    for view in (base.conj(), base.conj().imag, torch._neg_view(base.real)):
        want = oracle.clipped(view.resolve_conj().resolve_neg().clone(), total([view]), 0.5)
        gradclip.clip_([parameter(view)], 0.5)
        assert oracle.same_bits(view, want)
    part = torch._neg_view(torch.tensor([3.0, -0.25, -5.0]))
    gradclip.clip_grad_value_([parameter(part)], 1.0)
    assert part.tolist() == [-1.0, 0.25, 1.0]


def test_a_module_a_tensor_and_named_pairs(route: str) -> None:
    for form in (
        lambda module: module,
        lambda module: module.named_parameters(),
        lambda module: list(module.parameters()),
        lambda module: module.weight,
    ):
        module = torch.nn.Linear(2, 1, bias=False)
        module.weight.grad = torch.tensor([[3.0, 4.0]])
        assert gradclip.clip_(form(module), 2.5, eps=0.0).item() == 5.0
        assert module.weight.grad.tolist() == [[1.5, 2.0]]


def test_meta_gradients_have_a_meta_norm(route: str) -> None:
    norm = gradclip.clip_([parameter(torch.zeros(3, 4, device="meta"))], 1.0)
    assert (norm.device.type, norm.dim()) == ("meta", 0)


def test_a_clipper_remembers_its_last_clip(route: str) -> None:
    owner = parameter(torch.tensor([3.0, 4.0]))
    clipper = gradclip.Clipper([owner], 2.5, eps=0.0, error_if_nonfinite=True)
    clipper.clip_().zero_()
    assert clipper.coefficient == 0.5
    clipper.max_norm = 5.0
    gradient_of(owner).fill_(math.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        clipper.clip_()
    assert clipper.coefficient == 0.5
    gradient_of(owner).copy_(torch.tensor([24.0, 32.0]))
    assert clipper.clip_(scale=4.0).item() == 10.0
    assert (clipper.coefficient, gradient_of(owner).tolist()) == (0.5, [3.0, 4.0])


def test_a_total_off_the_host_is_taken_back(route: str) -> None:
    owner = parameter(torch.zeros(3, 4, device="meta"))
    total = gradclip.get_total_norm([gradient_of(owner)])
    gradclip.clip_grads_with_norm_([owner], 1.0, total)
    assert total.device.type == "meta"


def test_two_calls_write_what_one_does(route: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        gradient = random_values(5000, dtype, seed=12)
        one, two = parameter(gradient.clone()), parameter(gradient.clone())
        norm = gradclip.clip_([one], 1.0)
        again = gradclip.get_total_norm([gradient_of(two)])
        assert oracle.same_bits(norm, again)
        gradclip.clip_grads_with_norm_([two], 1.0, again)
        assert oracle.same_bits(gradient_of(one), gradient_of(two))


def test_a_total_norm_changed_by_its_owner_is_taken_at_its_word() -> None:
    owner = parameter(torch.tensor([3.0, 4.0]))
    norm = gradclip.get_total_norm([gradient_of(owner)])
    norm.mul_(2)
    gradclip.clip_grads_with_norm_([owner], 5.0, norm, eps=0.0)
    assert gradient_of(owner).tolist() == [1.5, 2.0]


def test_explain_prints_routes_and_reasons() -> None:
    views = [torch.ones(4, 4), torch.ones(6, 8)[:, :3], torch.ones(3).to_sparse(), torch.zeros(0)]
    views += [torch.ones(8, 8, 8)[::2, ::2, ::2], torch.tensor(1.0).expand(5)]
    owners = parameters(views)
    named = [(f"layer.{index}", owner) for index, owner in enumerate(owners)]
    plan = gradclip.explain(named)
    assert [row.parameter for row in plan.rows] == [name for name, _ in named]
    assert [row.route for row in plan.rows] == [
        "fused",
        "fused",
        "reference",
        "fused",
        "reference",
        "fused",
    ]
    reasons = [row.reason for row in plan.rows]
    assert reasons[:4] == ["dense", "6 rows", "sparse", "no elements"]
    assert reasons[4].startswith("strided in ")
    assert "5 times" in reasons[5]
    lines = str(plan).splitlines()
    assert len(lines) == 1 + len(owners)
    assert lines[0].split() == ["parameter", "dtype", "shape", "route", "reason", "chunks"]
    assert lines[1].split()[:2] == ["layer.0", "torch.float32"]


def test_explain_shows_the_kill_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADCLIP_FUSED", "0")
    (row,) = gradclip.explain(parameters([torch.ones(4)])).rows
    assert (row.route, row.reason) == ("reference", "GRADCLIP_FUSED=0")


def test_fake_gradients_give_a_fake_norm() -> None:
    """Shapes can be traced without data."""
    with FakeTensorMode():
        parameter = torch.nn.Parameter(torch.zeros(3))
        parameter.grad = torch.ones(3)
        norm = gradclip.clip_([parameter], 1.0)
        assert isinstance(norm, FakeTensor)
        assert norm.shape == ()
