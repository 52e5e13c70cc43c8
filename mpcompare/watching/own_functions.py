"""Functions of the user's own, ``torch.autograd.Function``, as functions of torch that a tape can hold.

Torch tells nobody of their calls, so ``Function.apply`` is replaced while somebody listens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.utils._pytree import tree_leaves

_APPLY = Function.__dict__["apply"]
PLAIN = (Tensor, torch.dtype, torch.device, int, float, bool, str, type(None))  # what a tape can hand on once more
Told = Callable[..., Callable[[Any], None] | None]
_told: list[Told] = []
_inside = [0]


class OwnFunction:
    """A function of the user's own, called as one of torch."""

    def __init__(self, kind: type[Function]) -> None:
        self.kind, self.__name__ = kind, kind.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.kind.apply(*args, **kwargs)


def listen(told: Told) -> None:
    """Tells of each call of a user's own function from now on. ``told`` is given function and arguments before it, and
    returns what is to be told of the result."""
    _told.append(told)
    Function.apply = classmethod(apply)


def leave(told: Told) -> None:
    """Tells ``told`` of no more calls."""
    if told in _told:
        _told.remove(told)
    if not _told:
        Function.apply = _APPLY


def is_called() -> bool:
    """Returns whether one of these functions is being called: what its forward method calls is a part of it."""
    return _inside[0] > 0


def apply(kind: type[Function], *args: Any, **kwargs: Any) -> Any:
    """Takes the place of ``Function.apply``. A compiler knows that by this name."""
    plain = is_own(kind) and all(isinstance(each, PLAIN) for each in tree_leaves((args, kwargs)))
    ends = [told(OwnFunction(kind), args, kwargs) for told in _told] if plain else []
    _inside[0] += 1
    try:
        result = called(kind, *args, **kwargs)
    finally:
        _inside[0] -= 1
    for end in ends:
        if end is not None:
            end(result)
    return result


def called(kind: type[Function], *args: Any, **kwargs: Any) -> Any:
    """Calls a function, and tells nobody."""
    return _APPLY.__get__(None, kind)(*args, **kwargs)


def is_own(kind: type[Function]) -> bool:
    """Returns whether a function is the user's, and neither torch's nor ours."""
    return kind.__module__.partition(".")[0] not in ("torch", "mpcompare")
