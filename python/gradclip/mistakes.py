"""What is passed by mistake for a list of parameters, and what to pass instead."""

import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from gradclip.describe import described, of_kind

_EXPECTED = (
    "expected a Module, a tensor, or an iterable of tensors or of (name, tensor) pairs, such as "
    "model.named_parameters()"
)
_OF_OPTIMIZER = '[p for g in optimizer.param_groups for p in g["params"]]'


def refuse_containers(parameters: object) -> None:
    """Refuses optimizers, dicts, methods, classes and strings: what holds no list of parameters.

    Raises:
        TypeError: what it is, and what to pass instead.
    """
    if isinstance(parameters, Optimizer):
        _refuse(f"{of_kind(parameters)}, an optimizer; pass {_OF_OPTIMIZER}")
    if isinstance(parameters, Mapping):
        _refuse(_mapping(parameters))
    if isinstance(parameters, types.MethodType) and parameters.__name__.endswith("parameters"):
        _refuse(f"a method that was not called; pass model.{parameters.__name__}()")
    if isinstance(parameters, type) and issubclass(parameters, nn.Module):
        _refuse(f"{described(parameters)}; pass an instance of it")
    if isinstance(parameters, str | bytes):
        raise not_iterable(parameters)


def not_iterable(parameters: object) -> TypeError:
    """The refusal of what has no entries."""
    return TypeError(f"`parameters` is {described(parameters)}; {_EXPECTED}")


def _refuse(what: str) -> NoReturn:
    raise TypeError(f"`parameters` is {what}")


def _mapping(mapping: Mapping[Any, Any]) -> str:
    if "param_groups" in mapping:
        return f"the state_dict of an optimizer, which has no parameters; pass {_OF_OPTIMIZER}"
    if "params" in mapping:
        return 'a group of optimizer.param_groups; pass group["params"]'
    if hasattr(mapping, "_metadata"):
        return "a state_dict, whose tensors have no gradients; pass model.named_parameters()"
    pairs = ".items()" if all(isinstance(key, str) for key in mapping) else ".values()"
    return f"{of_kind(mapping)}; pass its {pairs}"


def refuse_entries(entries: Sequence[object], names: Sequence[str] | None) -> None:
    """Refuses entries that are not tensors.

    Raises:
        TypeError: the position of the first such entry, what it is, and what to pass instead.
    """
    for position, entry in enumerate(entries):
        if not isinstance(entry, Tensor):
            where = f" as `{names[position]}`" if names else ""
            raise TypeError(
                f"`parameters` holds {type(entry).__name__} at position {position}{where}; "
                f"{_instead(entry, is_named=names is not None)}"
            )


def _instead(entry: object, is_named: bool) -> str:
    if isinstance(entry, nn.Module) and is_named:
        return "pass model.named_parameters()"
    if isinstance(entry, nn.Module):
        return "pass [p for module in modules for p in module.parameters()]"
    if isinstance(entry, Optimizer):
        return f"pass {_OF_OPTIMIZER} for each optimizer, in one list"
    if isinstance(entry, Mapping) and "params" in entry:
        return f"pass {_OF_OPTIMIZER}"
    if entry is None:
        return "leave out None"
    if isinstance(entry, Iterable) and not isinstance(entry, str | bytes):
        return "pass one flat list, such as itertools.chain.from_iterable(lists)"
    return "expected tensors, (name, tensor) pairs or a Module"


def refuse_pair(entry: object, position: int) -> NoReturn:
    """Refuses an entry of a list of pairs that is not a pair of a string and a tensor.

    Raises:
        TypeError: its position, and what is expected.
    """
    held = ""
    if isinstance(entry, tuple) and len(entry) == 2:
        held = f": it is ({', '.join(type(part).__name__ for part in entry)})"
    raise TypeError(
        f"`parameters` begins with a tuple and holds no (name, tensor) pair at position {position}"
        f"{held}; expected tensors alone, or pairs of a string and a tensor throughout"
    )


def refuse_as_scale(scale: object) -> None:
    """Refuses parameters that are passed to `Clipper.clip_`, which takes a loss scale.

    Raises:
        TypeError: what was passed, and how to clip its gradients.
    """
    if scale is None or isinstance(scale, float | int | str | bytes | Tensor):
        return
    if isinstance(scale, nn.Module | Optimizer | Iterable):
        raise TypeError(
            f"`scale` is {of_kind(scale)}, where a loss scale is expected; a Clipper clips the "
            "parameters that it was made of: call clip_(), or clipper(parameters) to clip others"
        )
