"""Hooks that a network's author put on its layers.

A record has the inputs of a layer as the hooks before its call leave them, and its outputs as the hooks after it leave
them. It has gradients as they are outside of all hooks. A layer with hooks that may change these numbers computes more
or less than was recorded of it. So it is no layer: it is work between layers, and so are its hooks. A hook that only
looks at an output changes nothing. Hooks of torch's that compute a weight before each call are a part of their layer.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from mpcompare.tasks.cast import HOOKS_OF_WEIGHTS, computed_by_hooks
from mpcompare.verdict.examine.forced.collected import put_back_collected
from mpcompare.verdict.examine.forced.record import OUTPUT, Call, Record, is_recorders


def without_hooked(record: Record, network: nn.Module) -> Record:
    """Returns a record without the layers whose numbers hooks of the network's own may change."""
    modules = dict(network.named_modules())
    with put_back_collected(network):
        calls = {
            name: each
            for name, each in record.calls.items()
            if name in ("", OUTPUT) or not _may_change(modules[name], each[0])  # those of the network handle nests
        }
    return replace(record, calls=defaultdict(list, calls))


def _may_change(module: nn.Module, call: Call) -> bool:
    """Returns whether a layer has hooks on what it is given or on gradients, or one that returns another output."""
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
    except Exception:  # whatever it asks of a tensor that has no graph
        return True


class HooksWithin:
    """The hooks that compute a layer's weights. A replay calls the layer within a call of the layer, and each hook
    once: these in the inner call, and others in the outer one.

    Attributes:
        sources: the names of the parameters that the weights are computed from.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, computed = module, computed_by_hooks(module)
        self._before = module._forward_pre_hooks
        self._weights, self.sources = list(computed), frozenset(part for parts in computed.values() for part in parts)

    def take_off(self) -> None:
        """Takes the hooks before the call off, where they compute weights."""
        if self._weights:
            self.module._forward_pre_hooks = OrderedDict()

    def put_back(self) -> None:
        """Puts the hooks before the call on again."""
        self.module._forward_pre_hooks = self._before

    @contextmanager
    def called(self, half: torch.dtype | None) -> Iterator[None]:
        """Puts them on while it is entered. The weights are rounded to ``half`` unless it is None, and their gradients
        are not rounded."""

        def round_(module: nn.Module, _: Any) -> None:
            for name in self._weights:
                exact: Tensor = getattr(module, name)
                rounding = exact.detach().to(half).to(exact.dtype) - exact.detach()
                setattr(module, name, exact + rounding)

        self.put_back()
        after, self.module._forward_hooks = self.module._forward_hooks, OrderedDict()
        handle = self.module.register_forward_pre_hook(round_) if self._weights and half is not None else None
        try:
            yield
        finally:
            if handle is not None:
                handle.remove()
            self.module._forward_hooks = after
            self.take_off()
