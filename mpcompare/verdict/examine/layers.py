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


def layers(model: nn.Module, order: Sequence[str], x: Tensor, rows: int) -> tuple[dict[str, Layer], int]:
    """Returns the owning layer of each parameter and buffer, and about how many numbers are summed at most in a step:
    in the longest sum with a weight, or over one channel in a batch, at all places (pixels, tokens) of all rows.

    Args:
        model: a copy, which is called.
        order: the layers in the order of their calls.
        x: a few samples, which tell the number of places.
        rows: the number of samples of a step.
    """
    lengths = [rows, *sums_with_weights(model)]
    made: dict[int, str] = {}  # by the id of an output, the layer that made it
    inputs: dict[str, str] = {}
    kept: list[Any] = []  # an output that is gone could lend its id to another

    def watch(name: str, module: nn.Module, args: Any, output: Any) -> None:
        kept.append(output)
        values = output[0] if isinstance(output, tuple) else output
        if isinstance(values, Tensor) and values.dim() > 1:
            lengths.append(of_a_channel(module, values) // len(x) * rows)
        if any(True for _ in module.children()):
            return
        if args and id(args[0]) in made:
            inputs[name] = made[id(args[0])]
        made[id(output)] = name

    for name, module in model.named_modules():
        module.register_forward_hook(partial(watch, name))
    with torch.no_grad():
        model(x)
    return owners(model, order, inputs), max(lengths)


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


def sums_with_weights(model: nn.Module) -> list[int]:
    """Returns for each weight the length of the longest sum with it. Forward sums over the inputs of a layer, and
    backward over its outputs. A weight may have its inputs first, as in x @ w."""
    some = [p for p in model.parameters() if p.dim() and p.numel()]
    return [max(p[0].numel(), p[:, 0].numel()) if p.dim() > 1 else len(p) for p in some]


def of_a_channel(module: nn.Module, output: Tensor) -> int:
    """Returns how many numbers of an output belong to one channel. The output has two dimensions or more."""
    channels_first = isinstance(module, (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase))
    return output.numel() // max(output.shape[1 if channels_first else -1], 1)


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
