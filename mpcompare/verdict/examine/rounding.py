"""The least error that any implementation of a precision may have: one rounding of each result of a whole step.

Autocast leaves some results in fp32, such as a transformer's stream of residuals. An implementation that rounds them is
right all the same. And where terms cancel, as in the gradient of a bias before a batch norm, which is 0, only these
errors are left.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten

from mpcompare.contract import Batches
from mpcompare.precision import FORMATS, Precision
from mpcompare.tasks.batch import each
from mpcompare.tasks.copies import copy_of
from mpcompare.tasks.draws import EXAMINED, seed_step, without_masks
from mpcompare.tasks.losses import Loss
from mpcompare.tasks.task import Params, put_buffers
from mpcompare.verdict.examine.forced.roundings import Roundings, in_operations
from mpcompare.verdict.examine.numerics import chunks, dimensions, sketch
from mpcompare.verdict.examine.oracle import unfrozen
from mpcompare.verdict.examine.parts_of_batch import rows_are_independent, shares_of
from mpcompare.verdict.examine.rounded_operands import rounded, rounded_batch
from mpcompare.verdict.judge.errors import RoundingError, RoundingErrors

SAMPLES = 8
ROWS = 256  # of a large batch whose rows do not depend on each other
ELEMENTS = 1 << 20  # of a large tensor, evenly spread: they tell in how many dimensions its errors vary


def rounding_errors(model: nn.Module, loss_fn: Loss, batches: Batches, precision: Precision) -> RoundingErrors:
    """Returns how far such errors move gradients, and buffers after the step, from rounded weights and inputs.

    Some rows of a large batch are enough where rows do not depend on each other. Then their errors are independent, and
    the error of a mean over more rows is smaller by the root of their number.

    The errors g - exact of a tensor have a covariance C, and vary in ``(tr C)^2 / tr C^2`` dimensions. Up to about
    ``numerics.SKETCH`` dimensions are told apart. Where they are many, the length of the error varies little.
    """
    fine = precision.unit_roundoff > FORMATS["fp32"].unit_roundoff  # fp32 arithmetic shows errors of u
    network = rounded(model, precision, dtype := torch.float32 if fine else torch.float64)
    batches = [rounded_batch(x, y, precision, dtype) for x, y in batches]
    batches, share = _some_rows(network, loss_fn, batches)
    # A loss scale keeps gradients in fp16's range. A backend that shows no layers may round a product before the bias.
    roundings = Roundings(precision, math.inf, before_bias=True)
    without_masks(network)  # so that the roundings are seen
    step = _Step(network, loss_fn, batches)
    exact = step.take()
    errors = {name: _Errors(t) for name, t in exact.items()}
    for roundings.sample in range(SAMPLES):
        # Scores of attention and their gradients sum up to 0 where a key has a bias: each operation is rounded.
        with roundings, in_operations(network), sdpa_kernel(SDPBackend.MATH):
            found = step.take(roundings)
        for name, again in found.items():
            if name in step.named:
                roundings.round_(again)  # gradients may be stored in 16 bits, too
            errors[name].add(name, again.sub_(exact[name]), exact[name])
    return {name: e.summed_up(share) for name, e in errors.items()}


def _some_rows(network: nn.Module, loss_fn: Loss, batches: Batches) -> tuple[Batches, float]:
    """Returns ROWS rows of a large batch whose rows are independent, and the factor from their errors to the errors of
    all rows. Any other batch is returned as it is, with a factor of 1."""
    n = sum(len(x) for x, _ in batches)
    if n <= ROWS or not first_rows_are_independent(network, loss_fn, batches):
        return batches, 1.0
    x, y = (each(lambda *t: torch.cat(t) if len(t) > 1 else t[0], *parts) for parts in zip(*batches, strict=True))
    return [(x[:ROWS], y[:ROWS])], math.sqrt(ROWS / n)


def first_rows_are_independent(network: nn.Module, loss_fn: Loss, batches: Batches) -> bool:
    """Returns whether the rows of batches in fp32 do not depend on each other, as far as the first ones tell."""
    x, y = (t[:8].double() if t.is_floating_point() else t[:8] for t in batches[0])
    return rows_are_independent(copy_of(network).double(), loss_fn, x, y)


class _Errors:
    """Sums up the errors of one tensor, sample by sample."""

    def __init__(self, exact: Tensor) -> None:
        self.norm = max(math.sqrt(_product(exact, exact)), 1e-300)
        self.squares: list[float] = []
        self.of_some: list[float] = []
        self.alongs: list[float] = []
        self.sketches: list[list[float]] = []

    def add(self, name: str, error: Tensor, exact: Tensor) -> None:
        """Adds the error of a sample."""
        self.squares.append(_product(error, error))
        self.alongs.append((_product(error, exact) / self.norm) ** 2)
        some = error.flatten()[:: max(1, -(-error.numel() // ELEMENTS))]
        self.of_some.append(_product(some, some))
        self.sketches.append(sketch({name: some})[name])

    def summed_up(self, share: float) -> RoundingError:
        """Returns the error, times ``share``, from the mean squares of all samples."""
        number = len(self.squares)
        square, part, along = (sum(each) / number for each in (self.squares, self.of_some, self.alongs))
        varied = dimensions(torch.tensor(self.sketches, dtype=torch.float64), part)
        return RoundingError(share * math.sqrt(square), varied, number, share * math.sqrt(along))


class _Step:
    """A step of a network, taken again and again from the same state. ``named`` has the parameters that are trained."""

    def __init__(self, network: nn.Module, loss_fn: Loss, batches: Batches) -> None:
        self.network, self.loss_fn, self.batches = network, loss_fn, batches
        self.named = unfrozen(network)

    def take(self, roundings: Roundings | None = None) -> Params:
        """Takes the step, and returns its gradients and the floating buffers after it."""
        network = self.network
        state = copy.deepcopy(dict(network.named_buffers()))
        found: Params = {}
        seed_step(EXAMINED)
        for (x, y), share in zip(self.batches, shares_of(self.loss_fn, [y for _, y in self.batches]), strict=True):
            output = network(x) if roundings is None else _rounded_call(network, x, roundings)
            (self.loss_fn(output, y) * share).backward()  # as the oracle has it
            if roundings is not None:
                roundings.passing("sum")  # the sum over micro-batches, which is in fp32
            for name, p in self.named.items():
                if p.grad is not None:
                    found[name] = found[name] + p.grad if name in found else p.grad
            network.zero_grad(set_to_none=True)
        found = {name: found[name] if name in found else torch.zeros_like(p) for name, p in self.named.items()}
        found |= {name: b.clone() for name, b in network.named_buffers() if b.is_floating_point() or b.is_complex()}
        put_buffers(network, state)
        return found


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


def _product(a: Tensor, b: Tensor) -> float:
    """Returns the scalar product of two tensors, in float64."""
    return sum(torch.dot(x.double(), y.double()).item() for x, y in chunks(a, b))
