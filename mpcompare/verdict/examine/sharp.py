"""Weights at which nothing is nearly linear.

The weights of every layer of products are multiplied until its output has a spread of several units, biases and the
factors of norms are moved, and all of them are rounded to the precision, so that every implementation holds the same
weights. The weights follow from the initial weights and the first batch: all entrants of a race share them.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from mpcompare.dtypes import rounded_to
from mpcompare.precision import Precision
from mpcompare.tasks.copies import copy_of
from mpcompare.tasks.frozen import dtypes_of
from mpcompare.tasks.task import Params, params_of
from mpcompare.verdict.examine.exact_values import Problem

ROWS = 64  # that tell how far outputs spread
SPREAD, OF_LOGITS = 3.0, 8.0  # standard deviations of the outputs of layers of products, and of the last layer
MOVED = 0.25  # biases and factors of norms, which begin at 0 and 1, are moved by so much
RECURRENT = {"weight_hh": 1.0}  # the size of results; 2 for other weights of layers that are no single product


def sharp_weights(problem: Problem, precision: Precision) -> Params:
    """Returns weights of the network at which the outputs of its products spread over several units. The weights of a
    layer are set when it is called in a call of the network with rows of the first micro-batch."""
    network, (x, _) = copy_of(problem.network), problem.batch[0]
    generator = torch.Generator().manual_seed(0)
    done: list[nn.Module] = []
    with torch.no_grad():
        for p in network.parameters():
            if p.numel() and bool((p == p.flatten()[0]).all()) and p.dim() < 2:
                p.add_(torch.randn(p.shape, generator=generator).mul_(MOVED).to(p.device))
        for module in network.modules():
            if isinstance(module, (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)):
                _spread_by_size(module)
        hook = _spread_by_output(done, generator)
        for module in network.modules():
            if isinstance(module, (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd)):
                module.register_forward_hook(hook, with_kwargs=True)
        network(x[:ROWS])
        if done:
            done[-1].weight.mul_(OF_LOGITS / SPREAD)  # type: ignore[operator]
    weights = {name: rounded_to(p, precision.storage) for name, p in params_of(network).items()}
    return weights | {name: weights[name].to(dtype).float() for name, dtype in dtypes_of(network).items()}


def _spread_by_output(done: list[nn.Module], generator: torch.Generator) -> Callable[..., Any]:
    """Returns a hook that multiplies a layer's weights until its output spreads over SPREAD, and adds the layer to
    ``done``. The factors are powers of 2^(1/4), so that no order of sums changes them."""

    def hook(module: nn.Module, inputs: Any, named: Any, output: Any) -> Any:
        weight = module._parameters.get("weight")
        if weight is None or module in done:
            return None
        done.append(module)
        if not weight.any():
            drawn = torch.randn(weight.shape, generator=generator).div_(math.sqrt(max(weight[0].numel(), 1)))
            weight.copy_(drawn.to(weight.device))
            output = module.forward(*inputs, **named)
        product = next(filter(torch.is_tensor, tree_leaves(output)))  # a router returns more
        spread = float(product.std())
        if 0 < spread < math.inf:
            weight.mul_(2 ** (round(4 * math.log2(SPREAD / spread)) / 4))
        return module.forward(*inputs, **named)

    return hook


def _spread_by_size(module: nn.Module) -> None:
    """Multiplies the matrices of a layer whose products cannot be seen. Inputs of size 1 then make outputs of size 2,
    and states make outputs of size 1: with more, the errors of recurrent layers would grow from step to step."""
    for name, p in module.named_parameters(recurse=False):
        size = float(p.square().mean().sqrt()) * math.sqrt(p.shape[-1])
        if p.dim() == 2 and size > 0:
            gain = next((gain for part, gain in RECURRENT.items() if name.startswith(part)), 2.0)
            p.mul_(gain / size)
