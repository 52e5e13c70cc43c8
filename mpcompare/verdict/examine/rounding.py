"""The least error that any implementation of a precision may have: one rounding of each result of a whole step.

Autocast leaves some results in fp32, such as a transformer's stream of residuals. An implementation that rounds them is
right all the same. And where terms cancel, as in the gradient of a bias before a batch norm, which is 0, nothing but
these errors is left.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten

from mpcompare.contract import Batches
from mpcompare.precision import FORMATS, Precision
from mpcompare.tasks.batch import each
from mpcompare.tasks.draws import EXAMINED, seed_step, without_masks
from mpcompare.tasks.losses import Loss
from mpcompare.verdict.examine.forced.roundings import Roundings, in_operations
from mpcompare.verdict.examine.numerics import chunks, sketch
from mpcompare.verdict.examine.oracle import rounded, rounded_batch, rows_are_independent, shares_of, unfrozen
from mpcompare.verdict.findings import RoundingError

SAMPLES = 8
ROWS = 256  # of a large batch whose rows do not depend on each other
ELEMENTS = 1 << 20  # of a large tensor, evenly spread, from which is estimated in how many dimensions its errors vary
SQUARES = 1e-25, 1e30  # sums of squares in fp32 from which nothing that counts is missing


def rounding_errors(
    model: nn.Module, loss_fn: Loss, batches: Batches, precision: Precision, number: int = SAMPLES
) -> dict[str, RoundingError]:
    """Returns how far such errors move gradients, and buffers after the step, from rounded weights and inputs.

    Some rows of a large batch are enough where rows do not depend on each other: neither do their errors, and the mean
    over more rows has smaller ones, like the root of their number.

    Errors g - exact of a tensor, whose covariance is C, vary in ``(tr C)^2 / tr C^2`` dimensions, of which up to about
    ``numerics.SKETCH`` are told apart. Where they are many, the length of the error varies little.

    Args:
        number: that of the samples.
    """
    fine = precision.unit_roundoff > FORMATS["fp32"].unit_roundoff  # fp32 arithmetic shows errors of u
    network = rounded(model, precision).to(dtype := torch.float32 if fine else torch.float64)
    batches = [rounded_batch(x, y, precision, dtype) for x, y in batches]
    batches, share = _some_rows(network, loss_fn, batches)
    roundings = Roundings(precision, math.inf)  # a loss scale keeps gradients in fp16's range
    without_masks(network)  # so that its roundings are seen
    step = _Step(network, loss_fn, batches)
    exact = step.take()
    norms = _products(exact, exact).sqrt_().clamp_(min=1e-300)
    squares, of_some, alongs = (torch.zeros(len(step.names), dtype=torch.float64) for _ in range(3))
    sketches: dict[str, list[list[float]]] = {name: [] for name in step.names}
    gradients = len(step.named)
    for roundings.sample in range(number):
        # Scores of attention and their gradients sum up to 0 where a key has a bias: each operation is rounded.
        with roundings, in_operations(network), sdpa_kernel(SDPBackend.MATH):
            again = step.take(roundings)
        again[:gradients] = map(roundings.round_, again[:gradients])  # gradients may be stored in 16 bits, too
        errors = [a.sub_(e) for a, e in zip(again, exact, strict=True)]
        squares += _products(errors, errors) / number
        alongs += (_products(errors, exact) / norms).square() / number
        some = [e.flatten()[:: max(1, -(-e.numel() // ELEMENTS))] for e in errors]
        of_some += _products(some, some) / number
        for name, short in sketch(dict(zip(step.names, some, strict=True))).items():
            sketches[name].append(short)
    numbers = zip(step.names, squares.tolist(), of_some.tolist(), alongs.tolist(), strict=True)
    return {
        name: RoundingError(
            share * math.sqrt(square), _dimensions(part, sketches[name]), number, share * math.sqrt(along)
        )
        for name, square, part, along in numbers
    }


def _some_rows(network: nn.Module, loss_fn: Loss, batches: Batches) -> tuple[Batches, float]:
    """Returns ROWS rows of a large batch whose rows are independent, and the factor from their errors to those of all;
    any other batch as it is, and 1."""
    n = sum(len(x) for x, _ in batches)
    few = [t[:8].double() if t.is_floating_point() else t[:8] for t in batches[0]]
    if n <= ROWS or not rows_are_independent(copy.deepcopy(network).double(), loss_fn, few[0], few[1]):
        return batches, 1.0
    x, y = (each(lambda *t: torch.cat(t) if len(t) > 1 else t[0], *parts) for parts in zip(*batches, strict=True))
    return [(x[:ROWS], y[:ROWS])], math.sqrt(ROWS / n)


def _dimensions(square: float, sketches: Sequence[Sequence[float]]) -> float:
    """Returns the number of dimensions in which errors vary, from their mean square and their sketches.

    Errors of two samples are independent, so the mean square of their product is tr C^2.
    """
    samples = torch.tensor(sketches, dtype=torch.float64)
    products = torch.triu(samples @ samples.T, diagonal=1).square().sum().item() / math.comb(len(sketches), 2)
    return max(square**2 / products, 1.0) if products else 1.0


class _Step:
    """A step of a network, taken again and again from the same state.

    Attributes:
        named: the parameters that are trained.
        names: those of the tensors that the step returns, its gradients and then the floating buffers.
    """

    def __init__(self, network: nn.Module, loss_fn: Loss, batches: Batches) -> None:
        self.network, self.loss_fn, self.batches = network, loss_fn, batches
        self.named = unfrozen(network)
        self.statistics = [name for name, b in network.named_buffers() if b.is_floating_point()]
        self.names = [*self.named, *self.statistics]

    def take(self, roundings: Roundings | None = None) -> list[Tensor]:
        """Returns gradients and buffers of the step."""
        network, named = self.network, self.named
        state = copy.deepcopy(dict(network.named_buffers()))
        sums: list[Tensor] = []
        seed_step(EXAMINED)
        for (x, y), share in zip(self.batches, shares_of(self.loss_fn, [y for _, y in self.batches]), strict=True):
            output = network(x) if roundings is None else _rounded_call(network, x, roundings)
            (self.loss_fn(output, y) * share).backward()  # as the oracle has it
            if roundings is not None:
                roundings.passing("sum")  # of micro-batches, which is in fp32
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in named.values()]
            network.zero_grad(set_to_none=True)
            sums = [a + b for a, b in zip(sums, grads, strict=True)] if sums else grads
        buffers = [network.get_buffer(name).clone() for name in self.statistics]
        for name, before in state.items():
            network.get_buffer(name).copy_(before)
        return sums + buffers


def _rounded_call(network: nn.Module, x: Tensor, roundings: Roundings) -> Any:
    """Returns the output of a network in which all is rounded, forward and backward; the loss is in fp32."""

    def arrived(gradient: Tensor) -> Tensor:
        roundings.passing("backward")
        return roundings.round_(gradient.clone())

    roundings.passing("forward")
    output = network(x)
    roundings.passing("loss")
    for value in tree_flatten(output)[0]:
        if isinstance(value, Tensor) and value.requires_grad:
            value.register_hook(arrived)
    return output


def _products(some: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Returns the scalar product of each pair of tensors, float64."""
    return torch.tensor([_product(a, b) for a, b in zip(some, others, strict=True)], dtype=torch.float64)


def _product(a: Tensor, b: Tensor) -> float:
    """Returns the scalar product of two tensors: sums of pieces in their own dtype, added up in float64. A piece whose
    squares may be too small or too large for fp32 is summed in float64, too."""
    total = 0.0
    for x, y in chunks(a, b):
        squares = [torch.dot(x, x).item()] if a is b else [torch.dot(z, z).item() for z in (x, y)]
        safe = all(SQUARES[0] < square < SQUARES[1] for square in squares)
        if a is b and safe:
            total += squares[0]
        else:
            total += (torch.dot(x, y) if safe else torch.dot(x.double(), y.double())).item()
    return total
