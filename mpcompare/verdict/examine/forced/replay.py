"""The forced replay: a step in float64 that goes on, at each layer, from what the backend had there.

The network is called once. At a layer the input that arrives is compared with the recorded one: that is the work
between layers. The layer is computed from the recorded input, its output is compared with the recorded one, and the
recorded one is passed on. Backward does the same with gradients, and the gradients of a layer's parameters follow from
the recorded input and the recorded gradient. So no error travels, in any network, and by induction every operation of
the step is compared, each with the operands that the backend had.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from mpcompare.contract import Batches
from mpcompare.dtypes import as_complex
from mpcompare.instruments import fp32_products
from mpcompare.tasks.batch import tensors_of
from mpcompare.tasks.draws import EXAMINED, seed_step
from mpcompare.tasks.losses import Loss
from mpcompare.tasks.task import Params
from mpcompare.verdict.examine.forced.arithmetic import Arithmetic, Point
from mpcompare.verdict.examine.forced.formats import default_dtype
from mpcompare.verdict.examine.forced.gradient_sums import GradientSums
from mpcompare.verdict.examine.forced.network import ForcedNetwork
from mpcompare.verdict.examine.forced.own_products import halves_within
from mpcompare.verdict.examine.forced.random_numbers import Fed
from mpcompare.verdict.examine.forced.record import OUTPUT, Call, Record, is_real
from mpcompare.verdict.examine.forced.rows import as_given, factor_of, given_for, is_rounded, rows_of
from mpcompare.verdict.examine.forced.weights import backward
from mpcompare.verdict.examine.numerics import in_part, numbers
from mpcompare.verdict.examine.parts_of_batch import shares_of
from mpcompare.verdict.examine.unseen import Unseen


@dataclass
class Replay(ForcedNetwork):
    """A replay of one recorded step."""

    step: "Recorded"
    loss_is_rounded = False  # found when it has run: whether the loss is made of 16-bit numbers, and has more bits

    def __post_init__(self) -> None:
        super().__post_init__()
        self.scale = self.step.scale
        self.sums = GradientSums(self._calls_of_parameters(), self.weights.between, self.arithmetic.summed)
        self.factors = [self.scale]  # the factors of the recorded gradients, call by call of the network
        self.in_parts = False  # whether several calls of the network have one loss
        self.as_given = True  # whether the network's calls have the micro-batches, with their rows in order

    def run(self) -> float | None:
        """Returns the loss. It is None where nobody can tell which rows of the batches the network was called with: the
        gradients of its outputs are then the recorded ones.

        Raises:
            NotReplayedError: the network draws random numbers that the step did not draw.
        """
        calls = self.record.calls[OUTPUT]
        self.weights.held = calls[0].held if calls else {}
        self.weights.autocast = any(call.autocast for each in self.record.calls.values() for call in each)
        seed_step(EXAMINED)
        with (
            fp32_products.tf32(False),
            self.forcing(),
            self.weights,
            Fed(self.record.drawn, self.arithmetic.operand, self.choosing),
            default_dtype(self.dtype),
        ):
            loss = self.take(calls)
        with Unseen():
            for name, leaf in self.weights.between.items():
                if leaf.grad is not None:
                    self.sums.add(name, self._unscaled(leaf.grad), "")
                    self.sums.sources[name] |= self.users.get(name, set())
            self.hand_on(self.sums.end())
        return loss

    def take(self, calls: list[Call]) -> float | None:
        """Calls the network as the step did, with a backward after each call, and returns the loss as ``run`` does."""
        self.as_given = self.step.as_given
        if not self.as_given:
            return self._take_other_rows(calls)
        loss, targets = 0.0, [y for _, y in self.step.batches]
        for point, given, own in self.step.other_inputs:
            self.tell(point, given, self.arithmetic.operand(own.to(self.dtype)), given.dtype)
        for call, y, share in zip(calls, targets, shares_of(self.step.loss_fn, targets), strict=True):
            part = self._loss(self._output_of(call), y) * share
            loss += part.item()
            backward([part * self.arithmetic.kept], [None])
            self.arithmetic.whose("", "")
        return loss

    def _take_other_rows(self, calls: list[Call]) -> float | None:
        """Takes a step whose calls have the batches' rows in another order, or in parts: the loss is over all rows. If
        nobody can tell which rows the calls have, the gradients at the network's outputs are the recorded ones."""
        rows, outputs = rows_of(calls, self.step.batches, self.step.storage), [self._output_of(call) for call in calls]
        if rows is None or not all(
            isinstance(y, Tensor) and y.shape[:1] == own.shape for y, own in zip(outputs, rows, strict=True)
        ):
            for call, output in zip(calls, outputs, strict=True):
                self._backward(call, output)
            return None
        targets = [y for _, y in self.step.batches]
        whole = torch.cat(outputs)[torch.cat(rows).argsort()].split([len(y) for y in targets])
        parts = zip(whole, targets, shares_of(self.step.loss_fn, targets), strict=True)
        loss = torch.stack([self._loss(y, target) * share for y, target, share in parts]).sum()
        self.in_parts = True
        backward([loss * self.arithmetic.kept], [None])
        self.arithmetic.whose("", "")
        return loss.item()

    def _output_of(self, call: Call) -> Any:
        self.arithmetic.passing("forward")
        self.arithmetic.whose("forward", "")
        return self.call(call)

    def _loss(self, output: Any, y: Any) -> Tensor:
        return self.step.loss_fn(output, y.to(self.dtype) if y.is_floating_point() else y)

    def call(self, call: Call, computed: Mapping[int, Tensor] = MappingProxyType({}), part: str = "") -> Any:
        """Calls the network, or a part of it, with recorded arguments.

        Args:
            computed: by place the arguments that the replay has computed itself.
            part: the name of a module.
        """
        assert call.arguments is not None
        given = [computed[at] if at in computed else self._given(v) for at, v in enumerate(call.inputs)]
        args, kwargs = tree_unflatten(given, call.arguments)
        module = self.network.get_submodule(part)
        halves = halves_within(module, call.products, call.passes)
        with self.choosing.of(call.choices if self.is_forcing else [], call.near), self.weights.multiplying_in(halves):
            return module(*args, **kwargs)

    def _given(self, recorded: Any) -> Any:
        if not is_real(recorded):
            return recorded
        taken = recorded.to(self.dtype, copy=True)  # a network may write into its input
        storage = self.arithmetic.storage
        is_operand = storage is not None and recorded.dtype.itemsize <= storage.itemsize
        return self.arithmetic.operand(taken) if is_operand else taken

    def _backward(self, call: Call, output: Any) -> None:
        """Passes the gradients back that were recorded at the output of the network."""
        pairs = zip(tree_flatten(output)[0], call.gradients, strict=True)
        ends = [
            (y, g.to(self.dtype) / self.scale * self.arithmetic.kept)
            for y, g in pairs
            if g is not None and y.requires_grad
        ]
        if ends:
            backward([y for y, _ in ends], [g for _, g in ends])
        self.arithmetic.whose("", "")

    def _unscaled(self, grad: Tensor) -> Tensor:
        """Returns a gradient without the part of the loss scale that it keeps."""
        return grad if self.arithmetic.kept == 1 else grad / self.arithmetic.kept

    def in_full(self, name: str, grad: Tensor) -> Tensor:
        """Returns a part of a parameter's gradient without this part of the loss scale, in the dtype of the replay. A
        gradient that is neither added to another nor divided stays as it is."""
        if self.arithmetic.kept == 1 and self.sums.is_alone(name):
            return grad
        return self._unscaled(grad.to(as_complex(self.dtype, grad)))

    def hand_on(self, gradients: Params) -> None:
        """Hands on gradients that are whole, and frees each of them."""
        with torch.no_grad():
            while gradients:
                name, gradient = gradients.popitem()
                self.whole(name, numbers(gradient))

    def whole(self, name: str, gradient: Tensor) -> None:
        """Compares the gradient of a parameter, once all of it is there. Nobody keeps it here."""
        grads = self.step.grads
        shown = grads[name] if name in grads else torch.zeros_like(gradient)
        exact = gradient if gradient.shape == shown.shape else in_part(gradient)
        self.arithmetic.compare(Point("parameter", name), shown, exact, torch.float32)

    def _calls_of_parameters(self) -> Counter[str]:
        """Returns by parameter the number of recorded calls of the layers that have it."""
        counts: Counter[str] = Counter()
        for name, module in self.network.named_modules():
            if name in self.record.calls and name != OUTPUT:
                calls = len(self.record.calls[name])
                counts.update({self.weights.names[id(p)]: calls for p in module.parameters()})
        return counts

    def comes_to(self, call: Call, exact: Sequence[Tensor | None]) -> None:
        """Is told that backward comes to the output of a call of the network, with the exact gradients there."""
        self.arithmetic.passing("backward")
        self.sums.end_copies()
        # Parts of one batch have one factor: a mean of means over unequal parts has a different factor in each.
        is_known = self.in_parts and len(self.factors) > 1
        self.factors.append(self.factors[-1] if is_known else factor_of(call.gradients, exact, self.factors))


@dataclass(frozen=True)
class Recorded:
    """A recorded step, and everything that it was computed from."""

    record: Record
    network: nn.Module  # in the state that the step began with, fp32
    loss_fn: Loss
    batches: Batches
    loss: float  # the loss, as the backend says
    grads: Mapping[str, Tensor]  # by parameter, unscaled and not clipped; a large one of a loop is ``in_part``
    scale: float  # the loss scale
    buffers: Mapping[str, Tensor]  # after the step
    storage: torch.dtype = field(default=torch.float32, kw_only=True)  # the dtype of the precision

    @cached_property
    def as_given(self) -> bool:
        """Whether the network was called once for each micro-batch, with its inputs or rounded ones."""
        return as_given(self.record.calls[OUTPUT], self.batches, self.storage)

    @cached_property
    def other_inputs(self) -> list[tuple[Point, Tensor, Tensor]]:
        """The inputs of the network that are other numbers than the micro-batch's: where they are, and both."""
        pairs = (
            (Point("input", "", number, -place), given, own)
            for number, (call, (x, _)) in enumerate(zip(self.record.calls[OUTPUT], self.batches, strict=True))
            for place, (given, own) in enumerate(zip(given_for(call, x), tensors_of(x), strict=True), start=1)
        )
        return [(point, given, own) for point, given, own in pairs if not is_rounded(given, own, self.storage)]

    def new_replay(self, arithmetic: Arithmetic) -> Replay:
        """Returns a new replay of the step."""
        return Replay(self, arithmetic)
