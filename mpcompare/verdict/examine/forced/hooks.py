"""Hooks that a network's author put on its layers.

A record has the inputs of a layer as hooks before its call leave them, and its outputs as hooks after it do. What was
recorded of a layer with hooks is then more, or less, than the layer itself computes. So it is no layer: it is work
between layers, and so are its hooks. Hooks of torch's that compute a weight before each call are a part of their layer.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.tasks.cast import HOOKS_OF_WEIGHTS, computed_by_hooks
from mpcompare.verdict.examine.forced.record import OUTPUT, Record, is_recorders


def without_hooked(record: Record, network: nn.Module) -> Record:
    """Returns a record without the layers on which the network has hooks of its own."""
    modules = dict(network.named_modules())
    calls = {name: each for name, each in record.calls.items() if name == OUTPUT or not _hooked(name, modules[name])}
    return replace(record, calls=defaultdict(list, calls))


def _hooked(name: str, module: nn.Module) -> bool:
    before, after = module._forward_pre_hooks.values(), module._forward_hooks.values()
    own = [*(hook for hook in before if not isinstance(hook, HOOKS_OF_WEIGHTS)), *after]
    backward = [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
    # Those of the whole network open and close nests of tensors.
    return bool(name) and any(not is_recorders(hook) for hook in (*own, *backward))


class HooksOfWeights:
    """The hooks that compute a layer's weights. A replay calls the layer twice, and them once: within the layer.

    Attributes:
        sources: the names of the parameters that the weights are computed from.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self._hooks, computed = module, module._forward_pre_hooks, computed_by_hooks(module)
        self._weights, self.sources = list(computed), frozenset(part for parts in computed.values() for part in parts)

    def take_off(self) -> None:
        if self._weights:
            self.module._forward_pre_hooks = OrderedDict()

    def put_back(self) -> None:
        self.module._forward_pre_hooks = self._hooks

    @contextmanager
    def called(self, half: torch.dtype | None) -> Iterator[None]:
        """Puts them back while it is entered. The weights are then rounded to ``half``, if that is a format, and their
        gradients are not."""

        def round_(module: nn.Module, _: Any) -> None:
            for name in self._weights:
                exact: Tensor = getattr(module, name)
                rounding = exact.detach().to(half).to(exact.dtype) - exact.detach()
                setattr(module, name, exact + rounding)

        self.put_back()
        handle = self.module.register_forward_pre_hook(round_) if self._weights and half is not None else None
        try:
            yield
        finally:
            if handle is not None:
                handle.remove()
            self.take_off()
