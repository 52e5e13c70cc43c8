"""One forced call: a layer compares what arrives with what was recorded, and passes the record on, in both directions.

A :class:`Replay` calls the functions here, hidden from its modes. It knows the record, and is told of each comparison.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from mpcompare.dtypes import HALF
from mpcompare.tasks.cast import STAY_IN_FP32
from mpcompare.tasks.task import Params
from mpcompare.verdict.examine.forced.arithmetic import Arithmetic, Point
from mpcompare.verdict.examine.forced.choices import in_backward
from mpcompare.verdict.examine.forced.own_products import PRODUCTS, is_torchs, multiplies
from mpcompare.verdict.examine.forced.random_numbers import NotReplayedError, OtherPathError
from mpcompare.verdict.examine.forced.record import Call, is_real
from mpcompare.verdict.examine.forced.weights import fill, free
from mpcompare.verdict.examine.numerics import numbers, short_share, spread
from mpcompare.verdict.examine.rounded_operands import MULTIPLY

FEW = 4096  # elements of a parameter that tell whether a layer writes it


def half_of(module: nn.Module, call: Call) -> torch.dtype | None:
    """Returns the format of 16 bits in which a layer multiplies its weight as it is; None where it multiplies it in no
    such format."""
    results = [t.dtype for t in call.outputs if is_real(t)]
    return next((d for d in results if d in HALF), None) if multiplies(module) else None


@dataclass
class At:
    """The place of one forced call: a layer, or the output of the network or of a part of it."""

    replay: Any  # the :class:`Replay` that makes it
    name: str
    number: int
    call: Call
    differentiates = True  # The network wants gradients there. Within its own ``no_grad`` it wants none.

    def __post_init__(self) -> None:
        self.turns: dict[int, int] = {}  # by the number of a backward pass how many came to the call before
        self.arithmetic: Arithmetic = self.replay.arithmetic

    def given(self, xs: Sequence[Any]) -> None:
        """Compares what arrives at a layer.

        Raises:
            OtherPathError: it has another shape than what was recorded.
            NotReplayedError: it is sparse, and requires a gradient.
        """
        for place, (x, recorded) in enumerate(zip(xs, self.call.inputs, strict=False)):
            if is_real(recorded) and is_real(x):
                if x.layout is not torch.strided and x.requires_grad:
                    raise NotReplayedError(f"{self.name} passes a gradient to a sparse tensor")
                if x.shape != recorded.shape:
                    raise OtherPathError(f"other rows come to {self.name} when the network is called again")
                self._note_constant("input", recorded, x.requires_grad)
                self.replay.tell(Point("input", self.name, self.number, place), recorded, x, recorded.dtype)

    def _note_constant(self, kind: str, recorded: Tensor, depends: bool) -> None:
        """Notes numbers that have no more digits than 16 bits, unless they depend on parameters."""
        if depends or not self.differentiates or not self.arithmetic.is_exact:
            return
        if short_share(numbers(recorded)) == 1:
            self.replay.constants.add(f"{kind} {self.name}")

    def returns(self, results: Sequence[Any]) -> list[Any]:
        """Compares the results of a call, and returns those with which the network goes on."""
        replay, call, is_layer = self.replay, self.call, isinstance(self, ForcedLayer)
        for place, (recorded, y) in enumerate(zip(call.outputs, results, strict=False)):
            if is_real(recorded) and is_real(y):
                if y.requires_grad and self.differentiates and call.tracked and not call.passes[place]:
                    replay.detached.append(self.name)
                self._note_constant("output", recorded, y.requires_grad or call.passes[place])
                exact = y.detach().clamp(min=0) if call.rectified else y.detach()
                exact = exact.to(replay.dtype) if exact.dtype in HALF else exact
                point = Point("output", self.name, self.number, place, not is_layer)
                replay.tell(point, recorded, exact, recorded.dtype)
        if is_layer:
            self.arithmetic.passing("backward" if in_backward() else "forward")
        passed = [numbers_in(recorded, replay.dtype) for recorded in call.outputs]
        if call.rectified:  # below 0 the replay's own: relu makes 0 of it
            passed = [torch.where(z > 0, z, y.detach().clamp(max=0)) for z, y in zip(passed, results, strict=True)]
        # Numbers of 16 bits without a gradient, such as keys for a queue, are rounded, too. Positions in fp32 are not.
        rounds = [
            passes or (is_real(y) and y.dtype in HALF) for y, passes in zip(call.outputs, call.passes, strict=True)
        ]
        taken = [self.arithmetic.operand(p) if each else p for p, each in zip(passed, rounds, strict=True)]
        return list(map(alike, call.outputs, taken))

    def arrives(self, place: int, seen: Tensor | None, right: Tensor, turn: int = 0) -> Tensor:
        """Compares the gradient that arrives at an output, and returns the one that is taken.

        Args:
            seen: the recorded one; None where none arrived.
            right: the exact one.
            turn: the number of the backward pass through the call.
        """
        replay, arithmetic, is_layer = self.replay, self.arithmetic, isinstance(self, ForcedLayer)
        values = torch.zeros_like(right) if seen is None else numbers_in(seen, replay.dtype).div_(replay.factors[-1])
        taken = arithmetic.operand(values)
        taken = taken if arithmetic.kept == 1 else taken * arithmetic.kept
        taken = taken.to(self.dtype) if isinstance(self, ForcedLayer) else taken
        stored = self.call.outputs[place].dtype
        replay.tell(Point("gradient", self.name, self.number, place, not is_layer, turn), values, right, stored)
        return taken


@dataclass
class ForcedLayer(At):
    """The call of a layer."""

    module: nn.Module
    forward: Callable[[list[Any], Params], list[Any]]  # the layer's forward, a function of flat inputs and parameters
    sources: frozenset[str]  # the names of the parameters that hooks compute a weight from
    differentiates: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.half, self.moved = half_of(self.module, self.call), self.replay.weights.moved

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the call is computed: the replay's dtype, or fp32 for torch's products of 16-bit numbers.
        Such products are exact in fp32, and their sums are off by about 2^-24 of their terms, as the backend's sums
        are. An activation of 16-bit numbers is in fp32, too. A weight that a hook computes has more digits."""
        module, call = self.module, self.call
        if isinstance(module, PRODUCTS) and is_torchs(module) and self.half is not None and not self.sources:
            return torch.float32
        numbers = [t.dtype in HALF for t in (*call.inputs, *call.outputs) if is_real(t)]
        activation = type(module).__module__ == nn.GELU.__module__ and not call.held and all(numbers)
        return torch.float32 if activation else cast(torch.dtype, self.replay.dtype)

    def operands(self) -> tuple[list[Any], dict[str, Tensor]]:
        """Returns the operands: the recorded inputs, and the parameters as they were held. A layer of products whose
        output has 16 bits rounds both to 16 bits first."""
        dtype, taken = self.dtype, self.arithmetic.operand
        values = [taken(self.recorded(v).to(dtype)) if is_real(v) else v for v in self.call.inputs]
        for value in values:
            if is_real(value) and value.layout is torch.strided:  # a sparse one is constant, such as edges of a graph
                value.requires_grad_()
        params = {}
        for name, p in self.module.named_parameters():
            operand = self.replay.weights.cast(p, self._stored(name), dtype)
            params[name] = taken(operand).requires_grad_(p.requires_grad)
        return values, params

    def free(self, values: Sequence[Any], params: Params) -> None:
        """Frees the operands until backward."""
        for operand in (*(value for value, _ in self._copies(values)), *params.values()):
            free(operand)

    def fill(self, values: Sequence[Any], params: Params) -> None:
        """Puts their numbers back."""
        for value, recorded in self._copies(values):
            fill(value, self.recorded(recorded), self.arithmetic.operand)
        for name, held in self.held_parameters():
            fill(params[name], held, self.arithmetic.operand)

    def held_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the names and the numbers of the parameters, as the call held them, in any dtype."""
        weights = self.replay.weights
        yield from ((n, weights.numbers(p, self._stored(n), self.moved)) for n, p in self.module.named_parameters())

    def marks(self, params: Params) -> dict[str, tuple[int, float]]:
        """Returns marks of the parameters. A mark changes when the layer's forward writes the parameter. Torch's own
        layers write no parameter."""
        own = {} if is_torchs(self.module) else params
        return {name: (p.data_ptr(), float(spread(p, FEW).double().sum())) for name, p in own.items()}

    def copied(self) -> set[str]:
        """Returns the names of the parameters that the call copied to 16 bits, and that the network also uses outside
        of layers. The network may write into these before backward, as hooks that add noise to weights do."""
        weights, held = self.replay.weights, self.call.held
        copied = [(n, p) for n, p in self.module.named_parameters() if self.half not in (None, held.get(n))]
        return {name for name, p in copied if weights.names[id(p)] in weights.between}

    def add_gradients(self, params: Params, found: Iterator[Tensor | None], arrived: Sequence[Tensor]) -> None:
        """Adds the gradients of the parameters to their sums.

        Args:
            found: yields the gradients of the parameters that require one.
            arrived: the gradients that arrived at the outputs.
        """
        replay, held = self.replay, self.call.held
        names = {name: replay.weights.names[id(p)] for name, p in self.module.named_parameters()}
        for name, p in params.items():
            full = names[name]
            if p.requires_grad and (grad := next(found, None)) is not None:
                grad = self._summed(name, grad, arrived)
                # All uses of a parameter may have one copy of it in 16 bits: autocast makes such a copy for products,
                # whatever format their layer returns.
                has_copy = isinstance(self.module, MULTIPLY) or held.get(name) in HALF
                replay.sums.add(full, replay.in_full(full, grad), self.name, has_copy)
                del grad
                if isinstance(self.module, STAY_IN_FP32) and held.get(name) is torch.float32:
                    self.note_in_fp32(name, full, sum(g.numel() for g in arrived) / max(p.numel(), 1))
            replay.hand_on(replay.sums.counted(full))

    def _summed(self, name: str, grad: Tensor, arriving: Sequence[Tensor]) -> Tensor:
        """Returns the gradient of a parameter in an exact replay. oneDNN adds up the terms of a convolution's bias one
        by one, in fp32. Before a norm they cancel, so they are summed in float64."""
        module, inexact = self.module, self.replay.dtype is torch.float64 and grad.dtype is torch.float32
        if not (inexact and name == "bias" and isinstance(module, nn.modules.conv._ConvNd) and is_torchs(module)):
            return grad
        (g,) = arriving
        channels = g.dim() - len(module.kernel_size) - 1
        return g.double().sum([at for at in range(g.dim()) if at != channels])

    def note_in_fp32(self, name: str, full: str, terms: float) -> None:
        """Notes that a parameter is held in fp32, and the number of its gradient's terms. Its full name is ``full``."""
        replay = self.replay
        if name == "weight" and not isinstance(self.module, (nn.Embedding, nn.EmbeddingBag)):
            replay.gains.add(full)
        elif not list(self.module.children()):  # the terms below an activation of its own are not known
            replay.in_fp32[full] = max(terms, replay.in_fp32.get(full, 1.0))

    def _stored(self, name: str) -> torch.dtype | None:
        """Returns the format to which a parameter is rounded first. If a hook computes a weight from it, the parameter
        stays as it was held, and the weight is rounded."""
        return (None if name in self.sources else self.half) or self.call.held.get(name)

    def recorded(self, value: Tensor) -> Tensor:
        """Returns a recorded tensor, rounded to 16 bits where the layer multiplies in 16 bits."""
        return value.detach().to(self.half or value.dtype)

    def _copies(self, values: Sequence[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the operands that are copies of recorded inputs, each with its input. An operand of the same dtype may
        be the input itself. A sparse operand keeps its numbers."""
        for value, recorded in zip(values, self.call.inputs, strict=False):
            is_dense = is_real(value) and value.layout is torch.strided
            if is_dense and value.untyped_storage().data_ptr() != recorded.untyped_storage().data_ptr():
                yield value, recorded


def alike(recorded: Any, numbers: Any) -> Any:
    """Returns numbers as a tensor of the recorded one's class. It may have methods that the network calls."""
    is_other = is_real(recorded) and type(numbers) is not type(recorded)
    return numbers.as_subclass(type(recorded)) if is_other else numbers


def numbers_in(recorded: Any, dtype: torch.dtype, copy: bool = True) -> Any:
    """Returns a copy of a recorded tensor of real numbers in this dtype, and any other value itself."""
    return recorded.to(dtype, copy=copy) if is_real(recorded) else recorded
