"""The errors that clipping over ranks raises: one message on every rank, its cause's type kept."""

from __future__ import annotations

import builtins
from functools import cache

UNCHANGED = "no gradient was changed on any rank"

#: Types whose message stands alone; of any other the message begins with the type's name.
_SELF_EXPLANATORY = (TypeError, ValueError, RuntimeError, AttributeError)


class ShardedClipError(RuntimeError):
    """A clip over ranks that no rank carried out; every rank raises the same message.

    Where a rank failed with a built-in exception, what all ranks raise is of that type too, so
    that `except TypeError` works with one rank and with many.
    """

    def __str__(self) -> str:
        return RuntimeError.__str__(self)

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return sharded_error, (str(self), _builtin_name(type(self)))


class OwnershipError(ValueError):
    """The replicas of a gradient cannot be determined, or its placement cannot be clipped."""


def describe(cause: BaseException) -> str:
    """What an error says, led by its type unless the message alone is enough."""
    try:
        message = str(cause)
    except Exception:
        message = "(its message cannot be read)"
    kind = type(cause)
    if kind in _SELF_EXPLANATORY or isinstance(cause, (ShardedClipError, OwnershipError)):
        return message
    return f"{kind.__name__}: {message}"


def kind_of(cause: BaseException | None) -> str:
    """The name of the built-in exception that `cause` is; "" for none."""
    return "" if cause is None else _builtin_name(type(cause))


def sharded_error(message: str, kind: str = "") -> ShardedClipError:
    """A `ShardedClipError` that is also the built-in exception named `kind`."""
    return _class_for(kind)(message)


def _builtin_name(kind: type[BaseException]) -> str:
    for base in kind.__mro__:
        if base.__module__ == "builtins" and base not in (RuntimeError, Exception):
            return base.__name__ if issubclass(base, Exception) else ""
    return ""


@cache
def _class_for(kind: str) -> type[ShardedClipError]:
    builtin = getattr(builtins, kind, None) if kind else None
    if not isinstance(builtin, type) or not issubclass(builtin, Exception):
        return ShardedClipError
    namespace = {"__module__": __name__, "__doc__": ShardedClipError.__doc__}
    try:
        made = type("ShardedClipError", (ShardedClipError, builtin), namespace)
        made("tried")
    except TypeError:  # an exception whose memory layout or constructor does not combine
        return ShardedClipError
    return made
