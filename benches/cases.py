"""What is compared: each case pairs a call of gradclip with torch's call for the same work."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import gradclip
from benches.shapes import Shape, gpt2_small, parameters
from benches.timing import Call

SMALL: list[Shape] = [(256,)] * 2000
ONE_EACH: list[Shape] = [(1,)] * 148
NOTHING_TO_CLIP = 1e30
SHRINK = 0.99  # each active clip asks for a norm a little below the one before


@dataclass(frozen=True)
class Case:
    """Calls for the same work, gradclip's first, and the bytes of gradients they read once."""

    name: str
    calls: dict[str, Call]
    gradient_bytes: int


def all_cases() -> Iterator[Case]:
    """Every comparison, made one after the other so that one list of gradients lives at a time."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        yield from _model_cases(parameters(gpt2_small(), dtype), f"GPT-2 small, {_name(dtype)}")
    yield from _list_cases(parameters(SMALL, torch.float32), "2000 tensors of 256, float32")
    yield from _list_cases(parameters(ONE_EACH, torch.float32), "148 tensors of 1, float32")


def _model_cases(params: list[nn.Parameter], model: str) -> Iterator[Case]:
    for norm_type in (1.0, math.inf, 3.0):
        yield _norm(params, norm_type, f"{model}: norm, p = {norm_type:g}")
    yield from _list_cases(params, model)


def _list_cases(params: list[nn.Parameter], model: str) -> Iterator[Case]:
    yield _norm(params, 2.0, f"{model}: norm, p = 2")
    yield _norm_of_each(params, f"{model}: grad_norms")
    yield _inactive_clip(params, f"{model}: clip, nothing to clip")
    yield _active_clip(params, f"{model}: clip, active")


def _norm(params: list[nn.Parameter], norm_type: float, name: str) -> Case:
    gradients = _gradients(params)
    calls: dict[str, Call] = {
        "gradclip": lambda: gradclip.get_total_norm(gradients, norm_type),
        "torch": lambda: torch._foreach_norm(gradients, norm_type),
    }
    return Case(name, calls, _bytes(gradients))


def _norm_of_each(params: list[nn.Parameter], name: str) -> Case:
    gradients = _gradients(params)
    calls: dict[str, Call] = {
        "gradclip": lambda: gradclip.grad_norms(params),
        "torch": lambda: torch._foreach_norm(gradients),
    }
    return Case(name, calls, _bytes(gradients))


def _inactive_clip(params: list[nn.Parameter], name: str) -> Case:
    calls: dict[str, Call] = {
        "gradclip": lambda: gradclip.clip_(params, NOTHING_TO_CLIP),
        "torch": lambda: torch.nn.utils.clip_grad_norm_(params, NOTHING_TO_CLIP),
    }
    return Case(name, calls, _bytes(_gradients(params)))


def _active_clip(params: list[nn.Parameter], name: str) -> Case:
    max_norm = _shrinking(float(gradclip.get_total_norm(_gradients(params))))
    calls: dict[str, Call] = {
        "gradclip": lambda: gradclip.clip_(params, max_norm()),
        "torch": lambda: torch.nn.utils.clip_grad_norm_(params, max_norm()),
    }
    return Case(name, calls, _bytes(_gradients(params)))


def _shrinking(norm: float) -> Callable[[], float]:
    """Limits that go on falling, so that every call finds something to clip."""

    def next_limit() -> float:
        nonlocal norm
        norm *= SHRINK
        return norm

    return next_limit


def _gradients(params: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in params if parameter.grad is not None]


def _bytes(gradients: list[Tensor]) -> int:
    return sum(gradient.nbytes for gradient in gradients)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
