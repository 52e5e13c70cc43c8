"""Kinks of functions that a network calls, and whether roundings that cross them tell in its gradients.

Where a function has a kink, a rounding of its input turns its derivative from one value to another. Few samples show
how often that happens, and by how much. But the most that it can do is known: all units whose inputs are within a few
roundings of the kink are turned at once. For relu that is far more than roundings make elsewhere; for its square,
whose derivative has no jump, it is nothing.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mpcompare.verdict.examine.oracle import Exact

RELU = ("relu", "relu_")
KINKED = ("relu", "hard", "threshold", "max_pool", "clamp", "maximum", "minimum", "abs")  # parts of functions' names
WITHIN = 4.0  # roundings of a typical input: units nearer to the kink are turned


class Kinks(TorchFunctionMode):
    """Looks for functions with a kink among those that are called.

    Attributes:
        turns: the part of a typical input within which units of relu are turned; 0: none are.
        of_relu, others: whether relu was called, and whether another function with a kink was.
    """

    def __init__(self, turns: float = 0.0) -> None:
        super().__init__()
        self.turns, self.of_relu, self.others = turns, False, False

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = getattr(func, "__name__", "")
        if name in RELU:
            self.of_relu = True
            if self.turns:
                return _Turned.apply(args[0], self.turns)
        else:
            self.others |= any(part in name for part in KINKED)
        return func(*args, **(kwargs or {}))


class _Turned(torch.autograd.Function):
    """relu, with the derivative of the other side where the input is near 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, turns: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.turns = turns
        return x.relu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        near = x.abs() < ctx.turns * x.square().mean().sqrt()
        return grad * ((x > 0) ^ near), None


def beside_turned_units(step: Callable[[], Exact], unit_roundoff: float) -> tuple[Exact, dict[str, float]]:
    """Returns a step, and by parameter the most that roundings at kinks change its gradient: inf where another function
    than relu has one.

    Args:
        step: takes the exact step, the same one each time.
    """
    with Kinks() as kinks:
        exact = step()
    if kinks.others or not kinks.of_relu:
        return exact, dict.fromkeys(exact.grads, math.inf if kinks.others else 0.0)
    with Kinks(WITHIN * unit_roundoff):
        turned = step().grads
    return exact, {name: (turned[name] - g).norm().item() for name, g in exact.grads.items()}
