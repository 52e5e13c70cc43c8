"""A network's smooth twin: the same layers, and in place of a layer with a kink one without.

A kink turns a rounding into a jump: a unit next to 0 turns on or off, another pixel becomes the largest. Measured on a
CNN with ReLU and MaxPool, the gradients of torch.amp lie 20 to 60 unit roundoffs from float64; on its twin with GELU
and AvgPool they lie 1.2 to 1.8. A backend's own errors show on the twin.
"""

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn

from mpcompare.tasks.draws import with_masks
from mpcompare.tasks.mlp import is_plain_mlp
from mpcompare.tasks.task import Task

SMOOTH_ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid)  # each becomes GELU
SMOOTH_POOLS: dict[Any, Any] = {nn.MaxPool1d: nn.AvgPool1d, nn.MaxPool2d: nn.AvgPool2d, nn.MaxPool3d: nn.AvgPool3d}
ADAPTIVE_POOLS: dict[Any, Any] = {
    nn.AdaptiveMaxPool1d: nn.AdaptiveAvgPool1d,
    nn.AdaptiveMaxPool2d: nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool3d: nn.AdaptiveAvgPool3d,
}


@dataclass(frozen=True)
class Kink:
    """A layer that was replaced: the class that has a kink, and the smooth one that stands in its place."""

    kinked: str
    smooth: str


def examined_twin(model: nn.Module, task: Task) -> tuple[nn.Module | None, dict[str, Kink]]:
    """Returns the twin on which a network is examined, and the replacements in it; None where it is examined itself.

    A network without kinks is examined itself, and so is a plain MLP: the backends that compute it by hand know relu
    and nothing smooth, and its kinks do little where the oracle starts from rounded weights and inputs. A dropout layer
    draws its masks there in a way that all backends share (tasks/draws.py), and is else as it was.
    """
    if is_plain_mlp(model, task):
        return None, {}
    twin, replaced = smooth_twin(model)
    masks = with_masks(twin)
    return (twin, replaced) if replaced or masks else (None, {})


def smooth_twin(model: nn.Module) -> tuple[nn.Module, dict[str, Kink]]:
    """Returns a copy of ``model`` with the same weights, whose modules have no kinks.

    Functions that a ``forward`` calls by itself, such as ``torch.relu``, stay as they are.

    Returns:
        The twin, and by name the modules that were replaced; empty where there was none.
    """
    twin, replaced = copy.deepcopy(model), {}
    for name, module in list(twin.named_modules()):
        smooth = _smooth(module)
        if smooth is not None and name:
            parent, _, child = name.rpartition(".")
            setattr(twin.get_submodule(parent), child, smooth)
            replaced[name] = Kink(type(module).__name__, type(smooth).__name__)
    return twin, replaced


def _smooth(module: nn.Module) -> nn.Module | None:
    if isinstance(module, SMOOTH_ACTIVATIONS):
        return nn.GELU()
    for kinked, pool in SMOOTH_POOLS.items():
        if isinstance(module, kinked) and module.dilation == 1:
            return pool(module.kernel_size, module.stride, module.padding, module.ceil_mode)
    for kinked, adaptive in ADAPTIVE_POOLS.items():
        if isinstance(module, kinked):
            return adaptive(module.output_size)
    return None
