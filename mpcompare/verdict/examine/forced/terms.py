"""The size of the terms of sums at each point: the error of a sum in fp32 is relative to them, and they may cancel.

A relative error of each operand that is uniform in +- u moves a sum of products t by about u (2/3 sum t^2)^(1/2). So
one more replay rounds each operand, and its distance from the exact replay tells the root of sum t^2. In torch's own
layers of products squares of the operands tell it, so these layers are not computed once more.
"""

import math

import torch
from torch import Tensor

from mpcompare.verdict.examine.forced.arithmetic import Arithmetic, Point
from mpcompare.verdict.examine.forced.call import ForcedLayer
from mpcompare.verdict.examine.forced.known import KnownLayers
from mpcompare.verdict.examine.forced.places import FP32, Errors
from mpcompare.verdict.examine.forced.random_numbers import OtherPathError
from mpcompare.verdict.examine.forced.replay import Recorded
from mpcompare.verdict.examine.forced.roundings import WHOLE
from mpcompare.verdict.examine.forced.samples import MOST, statistics
from mpcompare.verdict.examine.forced.squared_products import SquaredProduct, is_squared, squares


class TermsOfProducts:
    """The layers of products that are not computed, as :class:`KnownLayers` are for samples."""

    def __init__(self, errors: Errors, known: KnownLayers) -> None:
        self.errors, self.known = errors, known
        self.generator = torch.Generator().manual_seed(0)  # the network's own draws stay as they are

    def __contains__(self, layer: str) -> bool:
        if layer not in self.known or not is_squared(self.known.network.get_submodule(layer)):
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
