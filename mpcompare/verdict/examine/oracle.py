"""The oracle: the same module in float64 by autograd, what every backend is measured against."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.contract import Batches
from mpcompare.dtypes import DTYPES, unit_roundoff
from mpcompare.tasks.losses import Loss
from mpcompare.tasks.task import Params
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.reading import LOWEST

# Layers whose weights are operands of a product: a 16-bit implementation rounds them first.
MULTIPLY = (
    nn.Linear,
    nn.Bilinear,
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
)
# Layers whose output is some of the numbers of their input: nothing is rounded there.
SELECT = (nn.ReLU, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.Flatten, nn.Unflatten, nn.Identity, nn.Dropout)
ROWS = 1024  # of a large batch at a time, where rows do not depend on each other: all in float64 would not fit

Counts = dict[str, dict[str, list[int]]]


@dataclass(frozen=True)
class Exact:
    """What float64 makes of a batch.

    Attributes:
        loss: of the batch.
        grads: of every parameter that the loss depends on, float64.
        buffers: after the step (running statistics), float64.
        loss_noise: standard deviation of the loss if each stored activation is rounded once.
        exponents: ``numerics.exponents`` of ``activations``, ``gradients of activations`` (by layer) and
            ``gradients of weights`` (by parameter); empty unless it was asked for.
        order: the layers in the order in which they are called.
        shares: what each micro-batch adds to the gradients, as ``numerics.sketch``; empty where there is only one.
        largest: element of what a micro-batch adds to the gradients.
    """

    loss: float
    grads: Params
    buffers: Params
    loss_noise: float
    exponents: Counts = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    shares: list[dict[str, list[float]]] = field(default_factory=list)
    largest: float = 0.0

    def subnormal(self, scale: float) -> float:
        """Which part of the activations' gradients that are not 0, times ``scale``, is below fp16's normal numbers."""
        counts = torch.tensor(list(self.exponents.get("gradients of activations", {}).values()) or [[0, 0]])
        exponent = torch.arange(counts.shape[1] - 1) + LOWEST
        nonzero = counts[:, 1:].sum(dim=0)
        return float(nonzero[exponent + math.log2(scale) < -14].sum() / max(int(nonzero.sum()), 1))


def exact_step(
    model: nn.Module,
    loss_fn: Loss,
    batches: Batches,
    precision: str,
    count: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Exact:
    """Loss and gradients from the weights and inputs as the precision has them.

    Those that are multiplied are rounded first, because every implementation of the precision multiplies the rounded
    ones. What is left is what the implementation does. Beside unrounded ones that would drown in relu's masks: with the
    rounding of its inputs a unit next to 0 turns on or off, which is 20 times as much.

    A relative error uniform in +- u has the variance u^2 / 3, so var(loss) = u^2 / 3 sum (dz_i z_i)^2 over all z.

    Args:
        model: in fp32; it is left as it is.
        batches: the micro-batches of a step; its loss is the mean of theirs.
        count: whether exponents are counted.
        dtype: fp32 where orders of magnitude are all that is asked for.
    """
    network = rounded(model, precision).to(dtype)
    batches = [rounded_batch(x, y, precision, dtype) for x, y in batches]
    (x, y), share = batches[0], 1 / len(batches)
    rows = ROWS if len(x) > ROWS and rows_are_independent(network, loss_fn, x, y) else len(x)
    parts = [
        [(*part, share * len(part[0]) / len(x)) for part in zip(x.split(rows), y.split(rows), strict=True)]
        for x, y in batches
    ]
    named = {name: p for name, p in network.named_parameters() if p.requires_grad}
    total, squares = 0.0, 0.0
    grads: Params = {}
    counts: Counts = {}

    def add(group: str, name: str, values: Tensor) -> None:
        if count:
            found = numerics.exponents(values)
            before = counts.setdefault(group, {}).get(name)
            counts[group][name] = (found if before is None else found + torch.tensor(before)).tolist()

    order: list[str] = []
    shares: list[dict[str, list[float]]] = []
    largest = 0.0
    for micro_batch in parts:
        own: Params = {}
        for x_part, y_part, weight in micro_batch:
            with outputs_of(network) as outputs:
                part = loss_fn(network(x_part), y_part) * weight  # the parts' mean, weighted by their rows
            total += part.item()
            order = list(outputs)
            found = torch.autograd.grad(part, [*named.values(), *outputs.values()], allow_unused=True)
            for name, grad in zip(named, found, strict=False):
                if grad is not None:
                    own[name] = own[name] + grad if name in own else grad
            for name, grad in zip(outputs, found[len(named) :], strict=True):
                if grad is None:
                    continue
                output = outputs[name].detach()
                if not isinstance(network.get_submodule(name.partition("#")[0]), SELECT):
                    squares += (output * grad).square().sum().item()
                add("activations", name, output)
                add("gradients of activations", name, grad)
        largest = max([largest, *(_magnitude(g) for g in own.values())])
        if len(parts) > 1:
            shares.append(numerics.sketch(own))
        grads = {name: grads[name] + g if name in grads else g for name, g in own.items()}
    for name, grad in grads.items():
        add("gradients of weights", name, grad)
    buffers = {name: b.detach().to(dtype) for name, b in network.named_buffers()}
    noise = unit_roundoff(precision) * math.sqrt(squares / 3)
    return Exact(total, grads, buffers, noise, counts, order, shares, largest)


def _magnitude(values: Tensor) -> float:
    """``max |value|``, without a tensor of them."""
    low, high = values.aminmax()
    return max(-low.item(), high.item())


def rounded_batch(x: Tensor, y: Tensor, precision: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inputs as the precision has them, and targets, both in ``dtype`` where they are no whole numbers."""
    if x.is_floating_point():
        x = x.to(DTYPES[precision]).to(dtype)
    return x, y.to(dtype) if y.is_floating_point() else y


def rounded(model: nn.Module, precision: str) -> nn.Module:
    """A copy of ``model`` whose multiplied weights are rounded to the precision, in fp32."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, MULTIPLY):
                for p in module.parameters(recurse=False):
                    p.copy_(p.to(DTYPES[precision]))
    return model


@contextmanager
def outputs_of(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The outputs of all layers (modules without modules in them) in the order of their calls, while it is entered; a
    later call of the same layer is ``name#2``."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                calls = sum(known.partition("#")[0] == name for known in found)
                found[f"{name}#{calls + 1}" if calls else name] = tensor

        return hook

    layers = [(name, m) for name, m in model.named_modules() if not any(True for _ in m.children())]
    handles = [m.register_forward_hook(keep(name)) for name, m in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def rows_are_independent(network: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor) -> bool:
    """Whether the loss of a batch is the mean of its rows' losses, as far as eight rows in float64 tell. Batch norm
    couples them."""
    network = copy.deepcopy(network)
    with torch.no_grad():
        whole = loss_fn(network(x[:8]), y[:8])
        halves = [loss_fn(network(x[part]), y[part]) for part in (slice(0, 4), slice(4, 8))]
    return bool((whole - sum(halves) / 2).abs() <= 1e-10 * whole.abs())
