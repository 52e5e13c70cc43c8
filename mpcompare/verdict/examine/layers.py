"""The layers of a network as an examination needs them: the owner of each tensor, how long sums are, and the outputs of
layers with the gradients that arrive there."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.verdict.judge.errors import Layer

Called = tuple[str, nn.Module, Any, Any]  # the name, the module, the arguments and the output of a call


def layers(model: nn.Module, order: Sequence[str], x: Tensor, rows: int) -> tuple[dict[str, Layer], int]:
    """Returns the owning layer of each parameter and buffer, and about how many numbers are summed at most in a step.

    Args:
        model: a copy, which is called.
        order: the layers in the order of their calls.
        x: a few samples.
        rows: the number of samples of a step.
    """
    calls = _called(model, x)
    return owners(model, order, _inputs(calls)), _longest_sum(model, calls, len(x), rows)


def owners(model: nn.Module, order: Sequence[str], inputs: Mapping[str, str]) -> dict[str, Layer]:
    """Returns the owning layer of each parameter and buffer. ``inputs`` has, by layer, the other layer whose output it
    is given as it is."""
    places = {name: place for place, name in enumerate(order)}
    modules = dict(model.named_modules(remove_duplicate=False))  # a script of torch.jit has no get_submodule
    calls = Counter(name.partition("#")[0] for name in order)
    uses: Counter[int] = Counter()
    for name, module in model.named_modules():
        uses.update({id(p): max(calls[name], 1) for p in module.parameters(recurse=False)})
    found = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        layer, _, part = name.rpartition(".")
        path = layer.split(".")
        around = [".".join(path[:depth]) for depth in range(len(path))]
        found[name] = Layer(
            layer=layer,
            kind=type(modules[layer]).__name__,
            inside=[type(modules[outer]).__name__ for outer in around],
            part=part,
            place=places.get(layer, -1),
            after=inputs.get(layer, ""),
            uses=max(uses[id(tensor)], 1),
        )
    return found


def _inputs(calls: Sequence[Called]) -> dict[str, str]:
    """Returns, for each layer that is given the output of another layer as it is, the name of the other layer."""
    made: dict[int, str] = {}
    inputs: dict[str, str] = {}
    for name, module, args, output in calls:
        if any(True for _ in module.children()):
            continue
        if args and id(args[0]) in made:
            inputs[name] = made[id(args[0])]
        made[id(output)] = name
    return inputs


def _longest_sum(model: nn.Module, calls: Sequence[Called], few: int, rows: int) -> int:
    """Returns how many numbers are summed at most: the longest sum with a weight, or the numbers of one channel in a
    batch, at all places (pixels, tokens) of all ``rows``. A ``few`` rows tell the number of places."""
    lengths = [rows, *sums_with_weights(model)]
    for _, module, _, output in calls:
        values = output[0] if isinstance(output, tuple) else output
        if isinstance(values, Tensor) and values.dim() > 1:
            lengths.append(of_a_channel(module, values) // few * rows)
    return max(lengths)


def sums_with_weights(model: nn.Module) -> list[int]:
    """Returns for each weight the length of the longest sum with it. Forward sums over the inputs of a layer, and
    backward over its outputs. A weight may have its inputs first, as in x @ w."""
    some = [p for p in model.parameters() if p.dim() and p.numel()]
    return [max(p[0].numel(), p[:, 0].numel()) if p.dim() > 1 else len(p) for p in some]


def of_a_channel(module: nn.Module, output: Tensor) -> int:
    """Returns how many numbers of an output belong to one channel. The output has two dimensions or more."""
    channels_first = isinstance(module, (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase))
    return output.numel() // max(output.shape[1 if channels_first else -1], 1)


def _called(model: nn.Module, x: Tensor) -> list[Called]:
    """Calls a network, and returns all calls of its modules. Each output is kept: an output that is gone could lend its
    id to another."""
    calls: list[Called] = []

    def watch(name: str, module: nn.Module, args: Any, output: Any) -> None:
        calls.append((name, module, args, output))

    for name, module in model.named_modules():
        module.register_forward_hook(partial(watch, name))
    with torch.no_grad():
        model(x)
    return calls


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

    def keep(name: str, _: nn.Module, __: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if not isinstance(tensor, Tensor):
            return
        if tensor.requires_grad or not torch.is_grad_enabled():
            outputs.called.append(numbered(name, outputs.called))
        if tensor.requires_grad:
            own = numbered(name, outputs.tensors)
            outputs.tensors[own] = tensor
            tensor.register_hook(partial(outputs.gradients.__setitem__, own))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if not any(True for _ in module.children()):
                hooks.enter_context(module.register_forward_hook(partial(keep, name)))
        yield outputs


def numbered(name: str, known: Iterable[str]) -> str:
    """Returns the name of a layer's next call."""
    calls = sum(each.partition("#")[0] == name for each in known)
    return f"{name}#{calls + 1}" if calls else name
