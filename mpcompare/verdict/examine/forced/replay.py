"""The forced replay: a step in float64 that goes on, at each layer, from what the backend had there.

The network is called once. At a layer the input that arrives is compared with the recorded one: that is the work
between layers. The layer is computed from the recorded input, its output is compared with the recorded one, and the
recorded one is passed on. Backward does the same with gradients, and the gradients of a layer's parameters follow from
the recorded input and the recorded gradient. So no error travels, in any network, and by induction every operation of
the step is compared, each with the operands that the backend had.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from mpcompare.contract import Batches
from mpcompare.tasks.cast import STAY_IN_FP32
from mpcompare.tasks.draws import EXAMINED, seed_step
from mpcompare.tasks.losses import Loss
from mpcompare.tasks.task import Params
from mpcompare.verdict.examine.forced.random_numbers import Fed
from mpcompare.verdict.examine.forced.record import OUTPUT, Call, Record, in_backward, is_real
from mpcompare.verdict.examine.oracle import MULTIPLY, shares_of

HALF = (torch.float16, torch.bfloat16)


class Point(NamedTuple):
    """A place at which a replay is compared: ``kind`` is ``input``, ``output``, ``gradient`` (that arrives at the
    output), ``back`` (that the layer passes down, which nobody recorded), ``parameter`` or ``buffer``; ``layer`` is the
    name of the parameter or buffer there."""

    kind: str
    layer: str
    call: int = 0
    place: int = 0


# Is given a point, the recorded tensor, the exact one, and the dtype in which the first was seen.
Compare = Callable[[Point, Tensor, Tensor, torch.dtype], None]


@dataclass
class Replay:
    """A replay of one recorded step.

    Attributes:
        network: a copy, with the parameters and buffers that the step began with, in the dtype of the replay.
        scale: the loss scale of the record, by which its gradients are divided.
        kept: the part of that scale which gradients keep on their way through the network: with all of it, the numbers
            of backward are as large as in the step.
        compare: is called at each point.
        passing: is told which part of a micro-batch begins: ``forward``, ``loss``, ``backward`` of the network;
            and of a layer that computes ``constant`` numbers.
        operand: is given each operand of a layer, and of the work between layers, and returns the one that is taken.
        whose: is told whose operators come next: ``forward`` or ``backward`` and a layer, or ``before LAYER`` for the
            work between layers, empty where that layer is not known yet; or no part, and the layer that begins.
    """

    network: nn.Module
    record: Record
    loss_fn: Loss
    batches: Batches
    scale: float
    compare: Compare
    passing: Callable[[str], None] = lambda _: None
    kept: float = 1.0
    operand: Callable[[Tensor], Tensor] = lambda operand: operand
    whose: Callable[[str, str], None] = lambda part, place: None

    def run(self) -> tuple[float | None, Params]:
        """Returns the loss, and the gradients of the parameters by name. The loss is None where the network was called
        with other rows than those of the batches, as by a backend that splits them: the gradients of its outputs are
        then those that were recorded.

        Raises:
            OtherNumbersError: the network draws random numbers that the step did not draw.
        """
        parameter = next(self.network.parameters())
        self.dtype, self.names = parameter.dtype, {id(p): n for n, p in self.network.named_parameters()}
        self.grads: Params = {}
        self.sources: dict[str, set[str]] = {}  # by parameter the layers that its gradient comes from
        self.arrived: dict[str, list[float]] = {}
        self.in_fp32: dict[str, float] = {}  # by shift of a norm or embedding held in fp32, the terms of its sum
        self.gains: set[str] = set()  # of norms held in fp32
        self.detached: list[str] = []  # layers whose output passes no gradient back, and should
        self.factor = self.scale  # of the recorded gradients of this call of the network
        self.zero = torch.zeros((), dtype=self.dtype, device=parameter.device)
        calls, targets = self.record.calls[OUTPUT], [y for _, y in self.batches]
        self._hold(calls[0].held if calls else {})
        loss = 0.0 if self._as_given(calls) else None
        shares = shares_of(self.loss_fn, targets)
        seed_step(EXAMINED)
        with self._forcing(), Fed(self.record.drawn), default_dtype(self.dtype):
            for number, call in enumerate(calls):
                assert call.arguments is not None
                given = [v.to(self.dtype) if is_real(v) else v for v in call.inputs]
                args, kwargs = tree_unflatten(given, call.arguments)
                self.passing("forward")
                self.whose("forward", "")
                output = self.network(*args, **kwargs)
                if loss is None:
                    self._backward(call, output)
                    self.whose("", "")
                    continue
                y = targets[number]
                part = self.loss_fn(output, y.to(self.dtype) if y.is_floating_point() else y) * shares[number]
                loss += part.item()
                (part * self.kept).backward()
                self.whose("", "")
        for name, p in self.network.named_parameters():  # of those that no layer owns, such as a class token
            if p.grad is not None:
                self._add(name, self._unscaled(p.grad))
                p.grad = None
        return loss, self.grads

    def _hold(self, held: dict[str, torch.dtype]) -> None:
        """Rounds the parameters to the dtypes in which the step held them; no layer owns some, such as class tokens."""
        for name, p in self.network.named_parameters():
            p.data = p.detach().to(held.get(name, p.dtype)).to(self.dtype)

    def _as_given(self, calls: list[Call]) -> bool:
        """Returns whether the network was called once for each micro-batch, with its inputs but for a rounding."""
        if len(calls) != len(self.batches):
            return False
        for call, (x, _) in zip(calls, self.batches, strict=True):
            given = next((v for v in call.inputs if isinstance(v, Tensor)), None)
            if given is None or given.shape != x.shape:
                return False
            same = torch.isclose(given.double(), x.double(), rtol=2.0**-8, atol=2.0**-24, equal_nan=True)
            if not bool(same.all()):
                return False
        return True

    def _backward(self, call: Call, output: Any) -> None:
        """Passes the gradients back that were recorded at the output of the network."""
        pairs = zip(tree_flatten(output)[0], call.gradients, strict=True)
        ends = [(y, g.to(self.dtype) / self.scale * self.kept) for y, g in pairs if g is not None and y.requires_grad]
        if ends:
            torch.autograd.backward([y for y, _ in ends], [g for _, g in ends])

    def _unscaled(self, grad: Tensor) -> Tensor:
        """Returns a gradient without the part of the loss scale that it keeps."""
        if self.kept == 1:
            return grad
        with _disable_current_modes():
            return grad / self.kept

    def _add(self, name: str, grad: Tensor, of: str = "") -> None:
        """Adds a part to the gradient of a parameter, that of the layer ``of``."""
        self.sources.setdefault(name, set()).add(of)
        with _disable_current_modes():  # a sum in fp32, whatever is rounded
            self.grads[name] = self.grads[name] + grad if name in self.grads else grad

    @contextmanager
    def _forcing(self) -> Iterator[None]:
        """Puts a forced forward in the place of that of each recorded layer, and of the network."""
        originals = {}
        for name, module in self.network.named_modules():
            if hasattr(module, "inplace"):
                module.inplace = False  # a layer that writes into its input would write into the record
            if name in self.record.calls:
                originals[module] = module.forward
                module.forward = self._forced(name, module)
        whole = self.network.forward
        originals.setdefault(self.network, whole)
        self.network.forward = lambda *args, **kwargs: self._output(whole(*args, **kwargs))
        try:
            yield
        finally:
            for module in originals:
                del module.forward

    def _output(self, result: Any) -> Any:
        values, spec = tree_flatten(result)
        number, call = self._next(OUTPUT, values)
        if call is None:
            return result
        self.passing("loss")
        return tree_unflatten(list(_Forced.apply(self._token(values), _At(self, OUTPUT, number, call), *values)), spec)

    def _token(self, values: list[Any], module: nn.Module | None = None) -> Tensor:
        """Returns a number that requires a gradient where a layer does: its inputs may require none."""
        trained = module is not None and any(p.requires_grad for p in module.parameters())
        requires = trained or any(isinstance(v, Tensor) and v.requires_grad for v in values)
        return self.zero.detach().requires_grad_(requires)

    def _forced(self, name: str, module: nn.Module) -> Callable[..., Any]:
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            flat, spec = tree_flatten((args, kwargs))
            number, call = self._next(name, flat)
            if call is None:
                return original(*args, **kwargs)

            def layer(values: list[Any], params: Params) -> list[Any]:
                # Copies, because a layer may write into its inputs.
                again, named = tree_unflatten([v.clone() if is_real(v) else v for v in values], spec)
                forced, module.forward = module.forward, original
                try:
                    return tree_flatten(functional_call(module, params, again, named))[0]
                finally:
                    module.forward = forced

            assert call.spec is not None
            body = _Layer(module, layer)
            token = self._token(flat, module)
            return tree_unflatten(list(_Forced.apply(token, _At(self, name, number, call, body), *flat)), call.spec)

        return forward

    def _next(self, name: str, arriving: list[Any]) -> tuple[int, Call | None]:
        """Returns the number of this call and its record. A checkpoint repeats a call with the same numbers."""
        with _disable_current_modes():
            mark = sum(float(t.detach().double().sum()) for t in arriving if is_real(t))
        marks = self.arrived.setdefault(name, [])
        if in_backward() and mark in marks:
            number = marks.index(mark)
        else:
            number = len(marks)
            marks.append(mark)
        calls = self.record.calls.get(name, [])
        return number, calls[number] if number < len(calls) else None


@dataclass
class _Layer:
    """A layer, and its own forward as a function of flat inputs and parameters."""

    module: nn.Module
    forward: Callable[[list[Any], Params], list[Any]]

    def operands(self, call: Call, replay: Replay) -> tuple[list[Any], dict[str, Tensor]]:
        """Returns the operands of a call: the recorded inputs, and the parameters as they were held. A
        layer of products whose output has 16 bits rounds both to them first."""
        results = [t.dtype for t in call.outputs if is_real(t)]
        half = next((d for d in results if d in HALF), None) if isinstance(self.module, MULTIPLY) else None

        def rounded(t: Tensor, held: torch.dtype) -> Tensor:
            return replay.operand(t.detach().to(half or held).to(replay.dtype))

        values = [rounded(v, v.dtype).requires_grad_() if is_real(v) else v for v in call.inputs]
        params = {}
        for name, p in self.module.named_parameters():
            params[name] = rounded(p, call.held.get(name, p.dtype)).requires_grad_(p.requires_grad)
        return values, params


@dataclass
class _At:
    """The place of one forced call: that of a layer, or of the output of the network, whose layer is None."""

    replay: Replay
    name: str
    number: int
    call: Call
    layer: _Layer | None = None


class _Forced(torch.autograd.Function):
    """Compares what arrives at a call, and passes on what was recorded of it, forward and backward."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, at: "_At", *xs: Any):  # type: ignore[no-untyped-def]
        ctx.set_materialize_grads(False)
        ctx.at, replay, name, number, call, layer = at, at.replay, at.name, at.number, at.call, at.layer
        replay.whose("", name)
        if layer is None:
            ctx.values, ctx.params, ctx.results = list(xs), {}, list(xs)
        else:
            for place, (x, recorded) in enumerate(zip(xs, call.inputs, strict=False)):
                if is_real(recorded) and is_real(x):
                    replay.compare(Point("input", name, number, place), recorded, x, recorded.dtype)
            ctx.values, ctx.params = layer.operands(call, replay)
            if not any(call.passes):  # positions and masks are no quantities that a precision rounds
                replay.passing("constant")
            replay.whose("forward", name)
            with torch.enable_grad():
                ctx.results = layer.forward(ctx.values, ctx.params)
            replay.whose("", name)
        for place, (recorded, y) in enumerate(zip(call.outputs, ctx.results, strict=False)):
            if is_real(recorded) and is_real(y):
                if y.requires_grad and call.tracked and not call.passes[place]:
                    replay.detached.append(name)
                exact = y.detach().clamp(min=0) if call.rectified else y.detach()
                replay.compare(Point("output", name, number, place), recorded, exact, recorded.dtype)
        if layer is not None:
            replay.passing("backward" if in_backward() else "forward")
        passed = [_as(recorded, replay.dtype) for recorded in call.outputs]
        if call.rectified:  # below 0 the replay's own: relu makes 0 of it
            passed = [torch.where(z > 0, z, y.detach().clamp(max=0)) for z, y in zip(passed, ctx.results, strict=True)]
        passed = [replay.operand(p) if passes else p for p, passes in zip(passed, call.passes, strict=True)]
        untracked = [p for p, y in zip(passed, ctx.results, strict=False) if is_real(p) and not y.requires_grad]
        if layer is not None:
            ctx.mark_non_differentiable(*untracked)
            replay.whose("forward", "")
        return tuple(passed)

    @staticmethod
    def backward(ctx: Any, *arriving: Any):  # type: ignore[no-untyped-def]
        replay, call, layer = ctx.at.replay, ctx.at.call, ctx.at.layer
        replay.whose("", ctx.at.name)
        exact = [None if g is None else replay._unscaled(g) for g in arriving]
        if layer is None:
            replay.passing("backward")
            replay.factor = _factor(call.gradients, exact, replay.scale)
        ends, grads = [], []
        for place, (y, g, recorded) in enumerate(zip(ctx.results, exact, call.gradients, strict=False)):
            if not is_real(y) or (g is None and recorded is None):
                continue
            zero = torch.zeros_like(y)
            with _disable_current_modes():  # an operand is what it is: nothing rounds it
                seen = zero if recorded is None else recorded.detach().to(replay.dtype) / replay.factor
                taken = replay.operand(seen)
                taken = taken if replay.kept == 1 else taken * replay.kept
            stored = call.outputs[place].dtype
            replay.compare(Point("gradient", ctx.at.name, ctx.at.number, place), seen, zero if g is None else g, stored)
            if y.requires_grad or layer is None:
                ends.append(y)
                grads.append(taken)
        if layer is None:
            replay.whose("backward", f"before {ctx.at.name}")
            given = {id(y): g for y, g in zip(ends, grads, strict=True)}
            return (None,) * 2 + tuple(given.get(id(value)) for value in ctx.values)
        numbers = [v for v in ctx.values if is_real(v)]
        params = [p for p in ctx.params.values() if p.requires_grad]
        wanted = numbers + params
        replay.whose("backward", ctx.at.name)
        found = iter(torch.autograd.grad(ends, wanted, grads, allow_unused=True) if ends else ())
        replay.whose("", ctx.at.name)
        back = tuple(next(found, None) if is_real(v) else None for v in ctx.values)
        for place, g in enumerate(back):
            if g is not None:
                passed = replay._unscaled(g)
                replay.compare(Point("back", ctx.at.name, ctx.at.number, place), passed, passed, torch.float32)
        owned = dict(layer.module.named_parameters())
        for name, p in ctx.params.items():
            if p.requires_grad and (grad := next(found, None)) is not None:
                replay._add(full := replay.names[id(owned[name])], replay._unscaled(grad), ctx.at.name)
                if not isinstance(layer.module, STAY_IN_FP32) or call.held.get(name) is not torch.float32:
                    continue
                if name == "weight" and not isinstance(layer.module, (nn.Embedding, nn.EmbeddingBag)):
                    replay.gains.add(full)
                else:
                    terms = sum(y.numel() for y in ends) / max(p.numel(), 1)
                    replay.in_fp32[full] = max(terms, replay.in_fp32.get(full, 1.0))
        ctx.results = ctx.values = ctx.params = None
        replay.whose("backward", f"before {ctx.at.name}")
        return (None,) * 2 + back


def _factor(recorded: Sequence[Tensor | None], exact: Sequence[Tensor | None], scale: float) -> float:
    """Returns the factor by which a backend multiplies its gradients at the output of the network. That is the loss
    scale, unless the gradients are right but for another factor, which halves their errors: nobody asks a backend to
    say what it multiplies by and divides by again. Whether it does, the gradients of the parameters tell."""
    pairs = zip(recorded, exact, strict=False)
    with _disable_current_modes():
        some = [
            (g.detach().double().flatten(), e.detach().double().flatten())
            for g, e in pairs
            if e is not None and g is not None
        ]
        if not some:
            return scale
        seen, right = (torch.cat(each) for each in zip(*some, strict=True))
        square = float(right @ right)
        slope = float(seen @ right) / square if square else scale
        error, rest = (float((seen - factor * right).norm()) for factor in (scale, slope))
    return slope if slope and rest < error / 2 else scale


def _as(recorded: Any, dtype: torch.dtype) -> Any:
    return recorded.to(dtype, copy=True) if is_real(recorded) else recorded


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Numbers that a network makes on its way are of this dtype while it is entered."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
