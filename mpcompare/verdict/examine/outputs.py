"""The outputs of a network's layers, and the gradients that arrive at them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Outputs:
    """The outputs of layers (modules without modules in them), under their names; a layer's later call is
    ``name#2``."""

    # the names in the order of the calls, without layers through which no gradient passes
    called: list[str] = field(default_factory=list)
    # The outputs that require a gradient. A checkpoint calls its layers again in the backward pass, so the outputs may
    # come from either call.
    tensors: dict[str, Tensor] = field(default_factory=dict)
    # the gradients of the loss with respect to them, as far as a backward pass has reached
    gradients: dict[str, Tensor] = field(default_factory=dict)


@contextmanager
def outputs_of(model: nn.Module) -> Iterator[Outputs]:
    """Yields the outputs of all layers that are called while it is entered."""
    outputs = Outputs()

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if not isinstance(tensor, Tensor):
                return
            if tensor.requires_grad or not torch.is_grad_enabled():
                outputs.called.append(numbered(name, outputs.called))
            if tensor.requires_grad:
                own = numbered(name, outputs.tensors)
                outputs.tensors[own] = tensor
                tensor.register_hook(partial(outputs.gradients.__setitem__, own))

        return hook

    layers = [(name, m) for name, m in model.named_modules() if not any(True for _ in m.children())]
    with ExitStack() as hooks:
        for name, layer in layers:
            hooks.enter_context(layer.register_forward_hook(keep(name)))
        yield outputs


def numbered(name: str, known: Iterable[str]) -> str:
    """Returns the name of a layer's next call."""
    calls = sum(each.partition("#")[0] == name for each in known)
    return f"{name}#{calls + 1}" if calls else name
