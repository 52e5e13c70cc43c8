"""The squares of all terms of a linear layer, or of a convolution, summed without the products themselves.

Of y = x w, for all rows i and columns j, the sum over i, j and k of (x_ik w_kj)^2 is the sum over k of
(sum_i x_ik^2) (sum_j w_kj^2). A convolution is such a product for each group and each place of its kernel.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def is_squared(module: nn.Module) -> bool:
    """Returns whether a layer of products is one of those that :class:`SquaredProduct` knows."""
    return isinstance(module, nn.Linear) or (isinstance(module, nn.modules.conv._ConvNd) and not module.transposed)


def squares(values: Tensor) -> Tensor:
    """Returns the squares of some operands, float64. Numbers that are not finite, as a mask has, count as 0."""
    return values.double().square().nan_to_num_(0.0, 0.0, 0.0)


class SquaredProduct:
    """The product of a layer.

    Args:
        module: an ``nn.Linear``, or a convolution that is not transposed.
        x: its input, channels last for ``nn.Linear``; else they come before the dimensions of the kernel.
        weight: its weight ``[outputs, inputs of a group, ...]``.
    """

    def __init__(self, module: Any, x: Tensor, weight: Tensor) -> None:
        self.module, self.x, self.w = module, squares(x), weight.float().square()
        self.groups = 1 if isinstance(module, nn.Linear) else module.groups
        self.at = 1 - weight.dim()  # the dimension of channels, from the last one

    def of_output(self) -> float:
        """Returns the sum of the squared terms of the output."""
        # The squared weight, summed over the outputs of each group, is a weight with one output for each.
        return float(self._of(self.x, self.w.unflatten(0, (self.groups, -1)).sum(1).double()).sum())

    def of_weight(self, g: Tensor) -> float:
        """Returns the sum of the squared terms of the weight's gradient.

        Args:
            g: the squares of the gradient of the output, float64.
        """
        inputs = self._of(self.x, self.x.new_ones(self.groups, *self.w.shape[1:]))
        return float((inputs * g.unflatten(self.at, (self.groups, -1)).sum(self.at)).sum())

    def of_input(self, g: Tensor) -> Tensor:
        """Returns the squared terms of the gradient of the input, summed for each element of the input. Only the sums
        over the channels of a group are exact, and the sums of each channel. Their product is taken.

        Args:
            g: as of ``of_weight``.
        """
        of_rows = self.x.unflatten(self.at, (self.groups, -1)).select(self.at, 0).clone().requires_grad_()
        with torch.enable_grad():
            y = self._of(of_rows, self.w.sum(1, keepdim=True).double())
        (rows,) = torch.autograd.grad(y, of_rows, g)
        of_outputs = g.movedim(self.at, 0).reshape(len(self.w), -1).sum(1).view(self.groups, 1, -1)
        kernels = self.w if self.at == -1 else self.w.flatten(2).sum(2)
        channels = (of_outputs.float() @ kernels.unflatten(0, (self.groups, -1))).double()
        shares = channels / channels.sum(2, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        shares = shares.view(self.groups, -1, *(1 for _ in range(-1 - self.at)))
        return (rows.unsqueeze(self.at) * shares).flatten(self.at - 1, self.at)

    def _of(self, x: Tensor, w: Tensor) -> Tensor:
        """Returns the product of other operands."""
        if isinstance(self.module, nn.Linear):
            return F.linear(x, w)
        product: Tensor = self.module._conv_forward(x, w, None)
        return product
