"""A replay calls the hooks of a network, too, and puts back what they have changed.

A hook that collects the features of a layer appends to a list, writes into a dict, or sets a variable. The replay
computes with a copy of the network, but a function in a hook may be the user's own.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from mpcompare.tasks.copies import HOOKS

OF_MODULES = frozenset(vars(nn.Module()))  # the dicts that each module has
DEEP = 3  # from a hook to what it changes, such as a list in a dict of an object


@contextmanager
def put_back_collected(network: nn.Module) -> Iterator[None]:
    """Puts back, at its end, the variables, containers and attributes that the hooks of a network reach."""
    undo: dict[int, Callable[[], object]] = {}
    for module in network.modules():
        for kind in HOOKS:
            for hook in getattr(module, kind, {}).values():
                _reach(hook, undo, DEEP)
    try:
        yield
    finally:
        for each in undo.values():
            each()


def _reach(value: Any, undo: dict[int, Callable[[], object]], deep: int) -> None:
    """Adds to ``undo`` what puts back a value, and the values that it holds, so many levels ``deep``."""
    if id(value) in undo or isinstance(value, (Tensor, type, ModuleType)) or deep < 0:
        return
    inner: list[Any] = []
    if isinstance(value, FunctionType):
        cells = [cell for cell in value.__closure__ or () if _is_full(cell)]
        known = {name: value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__}
        contents = [cell.cell_contents for cell in cells]
        inner = [*contents, *known.values(), *(value.__defaults__ or ())]

        def put_back() -> None:
            value.__globals__.update(known)
            for cell, content in zip(cells, contents, strict=True):
                cell.cell_contents = content

        undo[id(value)] = put_back
    elif isinstance(value, MethodType):
        inner = [value.__self__]
    elif isinstance(value, partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, (list, deque)):
        inner = list(value)
        undo[id(value)] = partial(_refill, value, inner)
    elif isinstance(value, (dict, set)):
        kept = value.copy()
        inner = list(value.values()) if isinstance(value, dict) else []
        undo[id(value)] = partial(_refill, value, kept)
    elif hasattr(value, "__dict__"):
        undo[id(value)] = partial(_refill, vars(value), vars(value).copy())
        inner = [each for name, each in vars(value).items() if name not in OF_MODULES]
    for each in inner:
        _reach(each, undo, deep - 1)


def _refill(container: Any, values: Any) -> None:
    if len(container) == len(values) and all(a is b for a, b in zip(_flat(container), _flat(values), strict=True)):
        return
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(values)


def _flat(values: Any) -> list[Any]:
    return [each for pair in values.items() for each in pair] if isinstance(values, dict) else list(values)


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True
