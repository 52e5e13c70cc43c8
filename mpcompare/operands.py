"""The operands of linear layers, which a backend shows that calls no module: hooks would see nothing of its layers.

The verdict compares each of them with the same product in float64 (docs/verdict.md). No timed step shows any.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Operands(NamedTuple):
    """One call of a linear layer, ``output = input W + b``, for one micro-batch of n rows."""

    input: Tensor  # ``[n, in]``
    output: Tensor  # ``[n, out]``; with ``rectified`` what relu makes of it, 0 where the product was 0 or less
    gradient: Tensor  # ``[n, out]``, the gradient of the scaled loss with respect to the product
    rectified: bool = False


class Products:
    """Notes the products of steps, in the order in which they are taken: forward from the first layer to the last, and
    backward against it, micro-batch by micro-batch."""

    def __init__(self, layers: Sequence[str]) -> None:
        self.layers = layers
        self._forward: list[tuple[Tensor, Tensor, bool]] = []
        self._backward: list[Tensor] = []

    def forward(self, input: Tensor, output: Tensor, rectified: bool = False) -> None:
        """Notes a layer's product."""
        self._forward.append((input.clone(), output.clone(), rectified))

    def backward(self, gradient: Tensor) -> None:
        """Notes the gradient that arrives at a layer's product."""
        self._backward.append(gradient.clone())

    def shown(self) -> dict[str, list[Operands]]:
        """Returns the operands by name of the layer, a call for each micro-batch whose backward pass is over."""
        n, calls = len(self.layers), len(self._backward) // len(self.layers)
        of_layer: dict[str, list[Operands]] = {name: [] for name in self.layers}
        for begin in range(0, calls * n, n):
            gradients = self._backward[begin : begin + n][::-1]
            for name, (x, y, rectified), gradient in zip(
                self.layers, self._forward[begin : begin + n], gradients, strict=True
            ):
                of_layer[name].append(Operands(x, y, gradient, rectified))
        return of_layer
