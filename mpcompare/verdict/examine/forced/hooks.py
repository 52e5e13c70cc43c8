"""Hooks that a network's author put on its layers.

A record has the inputs of a layer as the hooks before its call leave them, and its outputs as the hooks after it leave
them. It has gradients as they are outside of all hooks. A layer with hooks that may change these numbers computes more
or less than was recorded of it. So such a layer, with its hooks, counts as work between layers. A hook that only looks
at an output changes nothing. Hooks of torch's that compute a weight before each call are a part of their layer.

A replay calls all hooks, too. A hook that collects the features of a layer appends to a list, writes into a dict, or
sets a variable. The replay computes with a copy of the network, but a function in a hook may be the user's own. So what
hooks have changed is put back.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from mpcompare.tasks.cast import HOOKS_OF_WEIGHTS, computed_by_hooks
from mpcompare.tasks.copies import HOOKS
from mpcompare.verdict.examine.forced.module_hooks import is_recorders
from mpcompare.verdict.examine.forced.record import OUTPUT, Call, Record
from mpcompare.verdict.examine.unseen import Unseen

OF_MODULES = frozenset(vars(nn.Module()))  # the dicts that each module has
DEEP = 3  # from a hook to what it changes, such as a list in a dict of an object


def without_hooked(record: Record, network: nn.Module) -> Record:
    """Returns a record without the layers whose numbers hooks of the network's own may change."""
    modules = dict(network.named_modules())
    with put_back_collected(network):
        calls = {
            name: each
            for name, each in record.calls.items()
            # The network's own hooks handle nests. A layer that was called in a look alone has no call.
            if name in ("", OUTPUT) or (each and not _may_change(modules[name], each[0]))
        }
    return replace(record, calls=defaultdict(list, calls))


def _may_change(module: nn.Module, call: Call) -> bool:
    """Returns whether a layer has hooks on its inputs or on gradients, or a hook that returns another output."""
    before = [hook for hook in module._forward_pre_hooks.values() if not isinstance(hook, HOOKS_OF_WEIGHTS)]
    backward = [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
    return any(not is_recorders(hook) for hook in (*before, *backward)) or any(
        _returns(number, hook, module, call) for number, hook in module._forward_hooks.items() if not is_recorders(hook)
    )


def _returns(number: int, hook: Any, module: nn.Module, call: Call) -> bool:
    """Returns whether a hook after a call returns something in the place of its output."""
    if call.arguments is None or call.spec is None:
        return True
    args, kwargs = tree_unflatten(call.inputs, call.arguments)
    output = tree_unflatten(call.outputs, call.spec)
    named = (kwargs,) if number in module._forward_hooks_with_kwargs else ()
    try:
        with torch.no_grad():
            return hook(module, args, *named, output) is not None
    except Exception:  # the hook may ask anything of a tensor that has no graph
        return True


class HooksWithin:
    """The hooks that compute a layer's weights. A replay calls the layer within a call of the layer, and each hook
    once: these hooks in the inner call, and all others in the outer call.

    Attributes:
        sources: the names of the parameters that the weights are computed from.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, computed = module, computed_by_hooks(module)
        self._before = module._forward_pre_hooks
        self._weights, self.sources = list(computed), frozenset(part for parts in computed.values() for part in parts)

    def taken_off(self) -> AbstractContextManager[Any]:
        """Takes off the hooks before the call, if they compute weights, while it is entered."""
        return mock.patch.object(self.module, "_forward_pre_hooks", OrderedDict() if self._weights else self._before)

    @contextmanager
    def called(self, half: torch.dtype | None) -> Iterator[None]:
        """Puts the hooks on while it is entered. The weights are rounded to ``half`` unless it is None, and their
        gradients are not rounded."""

        def round_(module: nn.Module, _: Any) -> None:
            for name in self._weights:
                exact: Tensor = getattr(module, name)
                with Unseen():  # it is no cast of the network
                    rounding = exact.detach().to(half).to(exact.dtype) - exact.detach()
                    setattr(module, name, exact + rounding)

        with mock.patch.multiple(self.module, _forward_pre_hooks=self._before, _forward_hooks=OrderedDict()):
            rounds = self._weights and half is not None
            with self.module.register_forward_pre_hook(round_) if rounds else nullcontext():
                yield


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
    """Adds to ``undo`` what puts back a value, and the values that it holds down to so many levels (``deep``)."""
    if id(value) in undo or isinstance(value, (Tensor, type, ModuleType)) or deep < 0:
        return
    inner: list[Any] = []
    if isinstance(value, FunctionType):
        cells = [cell for cell in value.__closure__ or () if cell != CellType()]
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
