"""One forced call: a layer compares what arrives with what was recorded, and passes the record on, in both directions.

A :class:`Replay` calls the functions here. It knows the record, and is told of each comparison.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from mpcompare.dtypes import HALF
from mpcompare.tasks.cast import STAY_IN_FP32
from mpcompare.tasks.task import Params
from mpcompare.verdict.examine.forced.arithmetic import Arithmetic, Point
from mpcompare.verdict.examine.forced.choices import in_backward
from mpcompare.verdict.examine.forced.random_numbers import NotReplayedError, OtherPathError
from mpcompare.verdict.examine.forced.record import Call, is_real
from mpcompare.verdict.examine.forced.weights import fill, free
from mpcompare.verdict.examine.numerics import spread
from mpcompare.verdict.examine.oracle import MULTIPLY

FEW = 4096  # elements of a parameter that tell whether a layer writes it
PRODUCTS = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd)


def is_torchs(module: nn.Module) -> bool:
    """Returns whether the code of a layer is torch's own. The code of a subclass may be another."""
    changed: set[str] = set()
    for each in type(module).__mro__:
        if each.__module__.startswith("torch.nn."):
            return each is not nn.Module and not changed & {*dir(each), "weight", "bias"}
        changed |= {name for name in vars(each) if not name.startswith("__")}
    return False


def half_of(module: nn.Module, call: Call) -> torch.dtype | None:
    """Returns the format of 16 bits in which a layer multiplies; None where it multiplies in no such format."""
    results = [t.dtype for t in call.outputs if is_real(t)]
    return next((d for d in results if d in HALF), None) if isinstance(module, MULTIPLY) else None


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
        """
        for place, (x, recorded) in enumerate(zip(xs, self.call.inputs, strict=False)):
            if is_real(recorded) and is_real(x):
                if x.shape != recorded.shape:
                    raise OtherPathError(f"other rows come to {self.name} when the network is called again")
                self.replay.tell(Point("input", self.name, self.number, place), recorded, x, recorded.dtype)

    def returns(self, results: Sequence[Any]) -> list[Any]:
        """Compares the results of a call, and returns those with which the network goes on."""
        replay, call, is_layer = self.replay, self.call, isinstance(self, ForcedLayer)
        for place, (recorded, y) in enumerate(zip(call.outputs, results, strict=False)):
            if is_real(recorded) and is_real(y):
                if y.requires_grad and self.differentiates and call.tracked and not call.passes[place]:
                    replay.detached.append(self.name)
                exact = y.detach().clamp(min=0) if call.rectified else y.detach()
                exact = exact.to(replay.dtype) if exact.dtype in HALF else exact
                replay.tell(
                    Point("output", self.name, self.number, place, not is_layer), recorded, exact, recorded.dtype
                )
        if is_layer:
            self.arithmetic.passing("backward" if in_backward() else "forward")
        passed = [_as(recorded, replay.dtype) for recorded in call.outputs]
        if call.rectified:  # below 0 the replay's own: relu makes 0 of it
            passed = [torch.where(z > 0, z, y.detach().clamp(max=0)) for z, y in zip(passed, results, strict=True)]
        # Numbers of 16 bits without a gradient, such as keys for a queue, are rounded, too. Positions in fp32 are not.
        rounds = [
            passes or (is_real(y) and y.dtype in HALF) for y, passes in zip(call.outputs, call.passes, strict=True)
        ]
        return [self.arithmetic.operand(p) if each else p for p, each in zip(passed, rounds, strict=True)]

    def arrives(self, place: int, seen: Tensor | None, right: Tensor, turn: int = 0) -> Tensor:
        """Compares the gradient that arrives at an output, and returns the one that is taken.

        Args:
            seen: the recorded one; None where none arrived.
            right: the exact one.
            turn: the number of the backward pass through the call.
        """
        replay, arithmetic, is_layer = self.replay, self.arithmetic, isinstance(self, ForcedLayer)
        with _disable_current_modes():  # an operand is what it is: nothing rounds it
            numbers = torch.zeros_like(right) if seen is None else _as(seen, replay.dtype).div_(replay.factors[-1])
            taken = arithmetic.operand(numbers)
            taken = taken if arithmetic.kept == 1 else taken * arithmetic.kept
            taken = taken.to(self.dtype) if isinstance(self, ForcedLayer) else taken
        stored = self.call.outputs[place].dtype
        replay.tell(Point("gradient", self.name, self.number, place, not is_layer, turn), numbers, right, stored)
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
        replay, dtype = self.replay, self.dtype

        def taken(t: Tensor) -> Tensor:
            with torch._C.DisableTorchFunction():  # this is no cast of the network
                return self.arithmetic.operand(self._recorded(t).to(dtype))

        values = [taken(v).requires_grad_() if is_real(v) else v for v in self.call.inputs]
        params = {}
        for name, p in self.module.named_parameters():
            operand = replay.weights.cast(p, self._stored(name), dtype)
            params[name] = self.arithmetic.operand(operand).requires_grad_(p.requires_grad)
        return values, params

    def free(self, values: Sequence[Any], params: Params) -> None:
        """Frees the operands until backward."""
        for operand in (*(value for value, _ in self._copies(values)), *params.values()):
            free(operand)

    def fill(self, values: Sequence[Any], params: Params) -> None:
        """Puts their numbers back."""
        for value, recorded in self._copies(values):
            fill(value, self._recorded(recorded), self.arithmetic.operand)
        for name, p in self.module.named_parameters():
            fill(params[name], self.replay.weights.numbers(p, self._stored(name), self.moved), self.arithmetic.operand)

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
                replay.sums.add(full, replay.in_full(grad), self.name, has_copy)
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

    def _recorded(self, value: Tensor) -> Tensor:
        """Returns a recorded tensor, rounded to 16 bits where the layer multiplies in 16 bits."""
        return value.detach().to(self.half or value.dtype)

    def _copies(self, values: Sequence[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the operands that are copies of recorded inputs, each with its input. An operand of the same dtype may
        be the input itself."""
        for value, recorded in zip(values, self.call.inputs, strict=False):
            if is_real(value) and value.untyped_storage().data_ptr() != recorded.untyped_storage().data_ptr():
                yield value, recorded


class Forced(torch.autograd.Function):
    """Compares what arrives at a call with the record, and passes on the record, forward and backward."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, at: At, *xs: Any):  # type: ignore[no-untyped-def]
        ctx.set_materialize_grads(False)
        ctx.at, replay, arithmetic, name, call = at, at.replay, at.arithmetic, at.name, at.call
        layer = at if isinstance(at, ForcedLayer) else None
        arithmetic.whose("", name)
        if layer is None:
            ctx.values, ctx.params, ctx.results = list(xs), {}, list(xs)
        else:
            at.given(xs)
            if name in arithmetic.known:
                arithmetic.known.forward(name)
                return tuple(arithmetic.operand(_as(y, replay.dtype)) for y in call.outputs)
            ctx.values, ctx.params = layer.operands()
            if not any(call.passes):  # positions and masks are no quantities that a precision rounds
                arithmetic.passing("constant")
            arithmetic.whose("forward", name)
            marks = layer.marks(ctx.params)
            with torch.enable_grad(), saved_tensors_hooks(_itself, _itself):
                ctx.results = layer.forward(ctx.values, ctx.params)
            written = {name for name, mark in layer.marks(ctx.params).items() if mark != marks[name]}
            written |= layer.copied()
            arithmetic.whose("", name)
        passed = at.returns(ctx.results)
        untracked = [p for p, y in zip(passed, ctx.results, strict=False) if is_real(p) and not y.requires_grad]
        if layer is not None:
            if not in_backward():  # if a checkpoint makes the operands again, backward needs them
                layer.free(ctx.values, {name: p for name, p in ctx.params.items() if name not in written})
            ctx.mark_non_differentiable(*untracked)
            arithmetic.whose("forward", "")
        ctx.results = [_place(y) if is_real(y) else None for y in ctx.results]
        return tuple(passed)

    @staticmethod
    def backward(ctx: Any, *arriving: Any):  # type: ignore[no-untyped-def]
        replay, arithmetic, call = ctx.at.replay, ctx.at.arithmetic, ctx.at.call
        layer = ctx.at if isinstance(ctx.at, ForcedLayer) else None
        arithmetic.whose("", ctx.at.name)
        exact = [None if g is None else replay._unscaled(g) for g in arriving]
        if layer is None:
            replay.comes_to(call, exact)
        elif ctx.at.name in arithmetic.known:
            return (None,) * 2 + arithmetic.known.backward(ctx.at, exact[0])
        if ctx.results is None:
            raise NotReplayedError(f"one backward comes to {ctx.at.name or 'the network'} several times")
        ends, grads, passed = [], [], dict[int, Tensor]()
        for place, (end, g, recorded) in enumerate(zip(ctx.results, exact, call.gradients, strict=False)):
            if g is None and recorded is None:
                continue
            right = replay.zero.new_zeros(call.outputs[place].shape) if g is None else g
            taken = ctx.at.arrives(place, recorded, right)
            if end is not None:
                ends.append(end)
                grads.append(taken)
                passed[place] = taken
        if layer is None:  # a network may return one tensor twice
            arithmetic.whose("backward", f"before {ctx.at.name}")
            return (None,) * 2 + tuple(passed.get(place) for place in range(len(ctx.values)))
        numbers = [v for v in ctx.values if is_real(v)]
        params = [p for p in ctx.params.values() if p.requires_grad]
        wanted = numbers + params
        layer.fill(ctx.values, ctx.params)
        arithmetic.whose("backward", ctx.at.name)
        edges = list(map(get_gradient_edge, wanted))  # with edges torch takes no mode off: see ``backward``
        found = iter(torch.autograd.grad(ends, edges, grads, allow_unused=True) if ends else ())
        arithmetic.whose("", ctx.at.name)
        back = tuple(_as(next(found, None), replay.dtype, copy=False) if is_real(v) else None for v in ctx.values)
        for place, g in enumerate(back):
            if g is not None:
                passed = replay._unscaled(g)
                replay.tell(Point("back", ctx.at.name, ctx.at.number, place), passed, passed, torch.float32)
        del params, wanted
        layer.free((), ctx.params)
        layer.add_gradients(ctx.params, found, grads)
        ctx.results = ctx.values = ctx.params = None
        arithmetic.whose("backward", f"before {ctx.at.name}")
        return (None,) * 2 + back


def _place(result: Tensor) -> Tensor | GradientEdge | None:
    """Returns the place of a result in autograd's graph, so that its numbers may be freed; None where it requires no
    gradient."""
    if not result.requires_grad:
        return None
    return result if result.is_leaf else get_gradient_edge(result)


def _itself(saved: Tensor) -> Tensor:
    """Stands in the place of a checkpoint's hooks within a layer. The layer has a graph of its own, and for each
    backward through another graph a checkpoint computes all of its layers once more."""
    return saved


def factor_of(recorded: Sequence[Tensor | None], exact: Sequence[Tensor | None], known: Sequence[float]) -> float:
    """Returns the factor by which a backend multiplies its gradients at the output of the network. It is the first of
    the ``known`` ones, unless another factor at least halves the errors: a backend need not say by which factor it
    multiplies and divides again. The gradients of the parameters tell whether it divides.

    Args:
        known: the loss scale, and the factors of earlier calls. The calls of one loss have one factor, though each call
            shows it only within its own roundings.
    """
    both = zip(recorded, exact, strict=False)
    pairs = [(g, e) for g, e in both if g is not None and e is not None]
    with _disable_current_modes():
        some = [(g.detach().double().flatten(), e.detach().double().flatten()) for g, e in pairs]
        if not some:
            return known[0]
        seen, right = (torch.cat(each) for each in zip(*some, strict=True))
        square = float(right @ right)
        slope = float(seen @ right) / square if square else 0.0
        # Few different numbers may all be rounded up, or all down: such an error is no factor.
        u = max(torch.finfo(g.dtype).eps / 2 for g, _ in pairs)
        if rounded := [f for f in known if abs(slope - f) <= u * abs(f)]:
            return rounded[0]
        rest = float((seen - slope * right).norm())
        return next((f for f in known if not rest < float((seen - f * right).norm()) / 2), slope or known[0])


def _as(recorded: Any, dtype: torch.dtype, copy: bool = True) -> Any:
    return recorded.to(dtype, copy=copy) if is_real(recorded) else recorded
