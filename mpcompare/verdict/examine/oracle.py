"""The oracle: the same module in float64 by autograd, the measure of every backend."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.contract import Batches
from mpcompare.dtypes import as_complex
from mpcompare.instruments import heap
from mpcompare.precision import FORMATS, Precision
from mpcompare.tasks.batch import Batch
from mpcompare.tasks.draws import EXAMINED, masks_are_shared, seed_step, state
from mpcompare.tasks.losses import Loss
from mpcompare.tasks.task import Params
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.exact_values import ExactValues, Mapped, Problem
from mpcompare.verdict.examine.layers import outputs_of
from mpcompare.verdict.examine.parts_of_batch import rows_are_independent, shares_of
from mpcompare.verdict.examine.rounded_operands import rounded, rounded_batch
from mpcompare.verdict.findings import LOWEST, Counts

# Layers whose output has only numbers of their input: nothing is rounded there.
SELECT = (nn.ReLU, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.Flatten, nn.Unflatten, nn.Identity)
ROWS = 1024  # of a large batch at a time if rows do not depend on each other: all rows in float64 would not fit


@dataclass(frozen=True)
class Exact:
    """A step in float64."""

    loss: float  # the loss of the batch
    grads: Mapping[str, Tensor]  # the gradient of every parameter that the loss depends on, float64
    buffers: Params = field(default_factory=dict)  # the buffers after the step (running statistics), float64
    loss_noise: float = 0.0  # standard deviation of the loss if each stored activation is rounded once
    # ``numerics.exponents`` of ``activations``, ``gradients of activations`` (by layer) and ``gradients of weights``
    # (by parameter); empty unless they were asked for
    exponents: Counts = field(default_factory=dict)
    order: list[str] = field(default_factory=list)  # the layers in the order in which they are called
    # the part of the gradients that each micro-batch adds, as ``numerics.sketch``; empty where there is only one
    shares: list[dict[str, list[float]]] = field(default_factory=list)
    # the share of each micro-batch in the loss, times the number of micro-batches
    weights: list[float] = field(default_factory=list)
    largest: float = 0.0  # the largest element of what a micro-batch adds to the gradients
    # the states in which the step left torch's generators (``tasks/draws.py``), after the forward pass of the first
    # micro-batch and in the end; empty where it drew nothing; empty texts where the drawn numbers depend on the dtype,
    # so that nobody draws the same numbers
    drawn: list[str] = field(default_factory=list)

    def subnormal(self, scale: float) -> float:
        """Returns the share of the nonzero gradients of activations, times ``scale``, below fp16's normal numbers."""
        counts = torch.tensor(list(self.exponents.get("gradients of activations", {}).values()) or [[0, 0]])
        exponent = torch.arange(counts.shape[1] - 1) + LOWEST
        nonzero = counts[:, 1:].sum(dim=0)
        smallest = math.log2(FORMATS["fp16"].smallest_normal)
        return float(nonzero[exponent + math.log2(scale) < smallest].sum() / max(int(nonzero.sum()), 1))


def oracle(values: ExactValues, precision: Precision) -> Exact:
    """Returns the exact step of the first batch at the initial weights; all entrants of a race share it. It starts from
    the operands of a precision: the backends' precision or another."""
    step = values.once(f"oracle-{precision.name}", _exact_values, precision)
    return Exact(**{**step, "grads": Mapped(step["grads"])})


def _exact_values(problem: Problem, precision: Precision) -> dict[str, Any]:
    return vars(exact_step(problem.network, problem.loss_fn, problem.batch, precision, count=precision.is_16_bit))


def exact_step(
    model: nn.Module,
    loss_fn: Loss,
    batches: Batches,
    precision: Precision,
    count: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Exact:
    """Returns loss and gradients from weights and inputs as the precision has them.

    Operands of products are rounded first, because every implementation of the precision multiplies rounded operands.
    The errors that are left are the implementation's. Compared with unrounded operands they would drown in relu's
    masks: the rounding of inputs turns a unit next to 0 on or off, which is 20 times as much. (A GPU may cut operands
    to TF32, and here they are rounded to nearest. The difference is within the limits, in units of this rounding.)

    A relative error uniform in +- u has the variance u^2 / 3, so var(loss) = u^2 / 3 sum (dz_i z_i)^2 over all z.

    Args:
        model: in fp32; it is left as it is.
        batches: the micro-batches of a step. Its loss is the mean over them, or over all of their labels that count.
        count: whether exponents are counted.
        dtype: fp32 where orders of magnitude are all that is asked for.
    """
    network = rounded(model, precision, dtype)
    heap.trim()  # the gradients do not fit where the copy in fp32 was
    batches = [rounded_batch(x, y, precision, dtype) for x, y in batches]
    x, y = batches[0]
    parts_of_loss = shares_of(loss_fn, [y for _, y in batches])
    rows = ROWS if len(x) > ROWS and rows_are_independent(network, loss_fn, x, y) else len(x)
    tally, sketches = _Tally(network, loss_fn, count), []
    seed_step(EXAMINED)
    before = state(x.device)
    for (x, y), share in zip(batches, parts_of_loss, strict=True):
        weights = [share * part for part in shares_of(loss_fn, y.split(rows))]
        own = tally.micro_batch(list(zip(x.split(rows), y.split(rows), weights, strict=True)))
        if len(batches) > 1:
            sketches.append(numerics.sketch(own))
    for name, grad in tally.grads.items():
        tally.count("gradients of weights", name, grad)
    drawn: list[str] = []
    if tally.drawn != before:
        after = state(x.device)
        drawn = [tally.drawn, after] if masks_are_shared(network, x[:8]) else ["", ""]
    return Exact(
        loss=tally.loss,
        grads=tally.grads,
        buffers={name: b.detach().to(as_complex(dtype, b)) for name, b in network.named_buffers()},
        loss_noise=precision.unit_roundoff * math.sqrt(tally.squares / 3),
        exponents=tally.counts,
        order=tally.order,
        shares=sketches,
        weights=[len(batches) * share for share in parts_of_loss],
        largest=tally.largest,
        drawn=drawn,
    )


class _Tally:
    """Sums up the parts of a step."""

    def __init__(self, network: nn.Module, loss_fn: Loss, counts: bool) -> None:
        self.network, self.loss_fn, self.counts_exponents = network, loss_fn, counts
        self.named = unfrozen(network)
        self.loss = self.squares = self.largest = 0.0
        self.grads: Params = {}
        self.counts: Counts = {}
        self.order: list[str] = []
        self.drawn = ""  # the state of the generators after the first forward pass

    def micro_batch(self, parts: Sequence[tuple[Batch, Batch, float]]) -> Params:
        """Adds a micro-batch: inputs and targets in parts, each with its weight in the mean of the loss. Returns what
        the micro-batch adds to the gradients."""
        own: Params = {}
        for x, y, weight in parts:
            for name, grad in self._part(x, y, weight).items():
                own[name] = own[name] + grad if name in own else grad
        self.largest = max([self.largest, *(abs(end.item()) for g in own.values() for end in g.aminmax())])
        self.grads |= {name: self.grads[name] + g if name in self.grads else g for name, g in own.items()}
        return own

    def _part(self, x: Batch, y: Batch, weight: float) -> Params:
        """Returns the gradients of a part.

        It calls ``backward``, as a training step does, and not ``torch.autograd.grad``: a reentrant checkpoint
        (``use_reentrant=True``) does not compute again with the latter.
        """
        with outputs_of(self.network) as outputs:
            part = self.loss_fn(self.network(x), y) * weight
            self.drawn = self.drawn or state(x.device)
            self.order = list(dict.fromkeys([*self.order, *outputs.called]))
            part.backward()
        self.loss += part.item()
        for name, output in outputs.tensors.items():
            if name not in outputs.gradients:
                continue
            output, grad = (numerics.numbers(each) for each in (output, outputs.gradients[name]))
            if not isinstance(self.network.get_submodule(name.partition("#")[0]), SELECT):
                self.squares += (output * grad).square().sum().item()
            self.count("activations", name, output)
            self.count("gradients of activations", name, grad)
        grads = {name: p.grad for name, p in self.named.items() if p.grad is not None}
        self.network.zero_grad(set_to_none=True)
        return grads

    def count(self, group: str, name: str, values: Tensor) -> None:
        """Adds the exponents of ``values`` to the counts of their group and name."""
        if self.counts_exponents:
            counts = numerics.exponents(values)
            before = self.counts.setdefault(group, {}).get(name)
            self.counts[group][name] = (counts if before is None else counts + torch.tensor(before)).tolist()


def unfrozen(network: nn.Module) -> dict[str, nn.Parameter]:
    """Lets all parameters of a network have gradients, and returns by name the parameters that had them before. The
    results of a frozen body are rounded like all else, and this shows in the gradients of its layers' outputs."""
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
    for p in network.parameters():
        if p.is_floating_point():
            p.requires_grad_(True)
    return trained
