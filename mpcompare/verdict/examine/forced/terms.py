"""The size of the terms of sums at each point: the error of a sum in fp32 is relative to them, and they may cancel.

A relative error of each operand that is uniform in +- u moves a sum of products t by about u (2/3 sum t^2)^(1/2). So
one more replay rounds each operand, and its distance from the exact replay tells the root of sum t^2. In torch's own
layers of products squares of the operands tell it, so these layers are not computed once more. Of y = x w, for all rows
i and columns j, the sum over i, j and k of (x_ik w_kj)^2 is the sum over k of (sum_i x_ik^2) (sum_j w_kj^2). A
convolution is such a product for each group and each place of its kernel.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpcompare.verdict.examine.forced.arithmetic import Arithmetic, Point
from mpcompare.verdict.examine.forced.call import ForcedLayer
from mpcompare.verdict.examine.forced.known import KnownLayers
from mpcompare.verdict.examine.forced.places import FP32, Errors
from mpcompare.verdict.examine.forced.random_numbers import OtherPathError
from mpcompare.verdict.examine.forced.replay import Recorded
from mpcompare.verdict.examine.forced.roundings import WHOLE
from mpcompare.verdict.examine.forced.samples import MOST, statistics


def squares(values: Tensor) -> Tensor:
    """Returns the squares of some operands, float64. Numbers that are not finite, as a mask has, count as 0."""
    return values.to(torch.float64, copy=True).square_().nan_to_num_(0.0, 0.0, 0.0)


class SquaredProduct:
    """The squares of all terms of a layer's product, summed without the products themselves.

    Args:
        module: an ``nn.Linear``, or a convolution that is not transposed.
        x: its input, channels last for ``nn.Linear``; else they come before the dimensions of the kernel.
        weight: its weight ``[outputs, inputs of a group, ...]``.
    """

    def __init__(self, module: Any, x: Tensor, weight: Tensor) -> None:
        self.module, self.x, self.w = module, squares(x), weight.to(torch.float32, copy=True).square_()
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


class TermsOfProducts:
    """The layers of products that are not computed, as :class:`KnownLayers` are for samples."""

    def __init__(self, errors: Errors, known: KnownLayers) -> None:
        self.errors, self.known = errors, known
        self.generator = torch.Generator().manual_seed(0)  # the network's own draws stay as they are

    def __contains__(self, layer: str) -> bool:
        module = self.known.network.get_submodule(layer)
        is_convolution = isinstance(module, nn.modules.conv._ConvNd) and not module.transposed
        if layer not in self.known or not (isinstance(module, nn.Linear) or is_convolution):
            return False
        # Elements of a gradient that were recorded as 0 may have large terms. A sum over all elements does not tell.
        return not any(map(self.errors.lost, self.known.params[layer]))

    def forward(self, at: ForcedLayer) -> None:
        """Finds the size of the terms of an output: products, and a bias."""
        operands = dict(at.held_parameters())
        rows = at.call.outputs[0].numel() / len(operands["weight"])
        bias = rows * float(operands["bias"].double().square().sum()) if "bias" in operands else 0.0
        self.errors.put_terms(Point("output", at.name), _product(at, operands["weight"]).of_output() + bias)

    def backward(self, at: ForcedLayer, arriving: Tensor) -> Tensor:
        """Finds the sizes of the terms of the gradients that a layer makes. Returns the gradient that it passes down,
        moved at random as far as roundings of the operands move it."""
        (recorded,) = at.call.gradients
        g = squares(arriving if recorded is None else recorded.double() / at.replay.factors[-1])
        product = _product(at, dict(at.held_parameters())["weight"])
        for name, p in at.module.named_parameters():
            terms = product.of_weight(g) if name == "weight" else float(g.sum())
            self.errors.put_terms(Point("parameter", at.replay.weights.names[id(p)]), terms)
        down = product.of_input(g)
        self.errors.put_terms(Point("back", at.name), float(down.sum()))
        signs = torch.randint(2, down.shape, generator=self.generator).mul_(2).sub_(1).to(down.device)
        moved = down.sqrt_().mul_(signs).mul_(self.known.roundings.u / math.sqrt(3))
        return self.known.passed(at.name) + moved.to(self.known.dtype)


def _product(at: ForcedLayer, weight: Tensor) -> SquaredProduct:
    return SquaredProduct(at.module, at.recorded(at.call.inputs[0]), weight)


class RoundedOperands(Arithmetic):
    """Each operand is rounded: the errors of sums show how large their terms are.

    Attributes:
        squares: the sum of (v dL/dv)^2 over all numbers v above the output of the network.
    """

    stores_all = True

    def __init__(self, errors: Errors, known: KnownLayers) -> None:
        super().__init__(known.dtype)
        self.errors, self.roundings, self.squares = errors, known.roundings, 0.0
        self.storage = known.roundings.adds_in
        self.known = TermsOfProducts(errors, known)

    def compare(self, point: Point, seen: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
        self.errors.summed(point, exact, self.roundings.u)

    def operand(self, operand: Tensor) -> Tensor:
        return self.roundings.round_(operand.clone()) if operand.dtype in WHOLE else operand

    def stored(self, value: Tensor) -> Tensor:
        return self.operand(value)


def find_terms(recorded: Recorded, errors: Errors, known: KnownLayers) -> None:
    """Finds the size of what is summed at each point, by the first replay that sends no rows to another expert.

    Args:
        known: as in ``samples.take_samples``.

    Raises:
        OtherPathError: every replay sends rows to another expert.
    """
    roundings, first = known.roundings, known.roundings.sample
    for roundings.sample in range(first, first + MOST):
        rounded = RoundedOperands(errors, known)
        again = recorded.new_replay(rounded)
        try:
            again.run()
            break
        except OtherPathError as error:
            other = error
    else:
        raise other
    errors.loss_noise = max(errors.loss_noise, 4 * FP32 * math.sqrt(rounded.squares))  # and numbers above the network
    for name, b in statistics(again):
        errors.summed(Point("buffer", name), b, roundings.u)
