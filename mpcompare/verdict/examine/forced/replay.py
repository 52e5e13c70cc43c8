"""The forced replay: a step in float64 that goes on, at each layer, from what the backend had there.

The network is called once. At a layer the input that arrives is compared with the recorded one: that is the work
between layers. The layer is computed from the recorded input, its output is compared with the recorded one, and the
recorded one is passed on. Backward does the same with gradients, and the gradients of a layer's parameters follow from
the recorded input and the recorded gradient. So no error travels, in any network, and by induction every operation of
the step is compared, each with the operands that the backend had.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from mpcompare.contract import Batches
from mpcompare.instruments import fp32_products
from mpcompare.tasks.draws import EXAMINED, seed_step
from mpcompare.tasks.losses import Loss
from mpcompare.tasks.task import Params
from mpcompare.verdict.examine.forced.arithmetic import Arithmetic, Point
from mpcompare.verdict.examine.forced.call import At, Forced, ForcedLayer, factor_of, half_of, is_torchs
from mpcompare.verdict.examine.forced.choices import Choosing, in_backward
from mpcompare.verdict.examine.forced.formats import default_dtype, limits_as_recorded
from mpcompare.verdict.examine.forced.gradient_sums import GradientSums
from mpcompare.verdict.examine.forced.hooks import HooksWithin
from mpcompare.verdict.examine.forced.opened import passed_openly
from mpcompare.verdict.examine.forced.own_products import half_within
from mpcompare.verdict.examine.forced.random_numbers import Fed
from mpcompare.verdict.examine.forced.record import OUTPUT, Call, Record, is_real
from mpcompare.verdict.examine.forced.rows import as_given, rows_of
from mpcompare.verdict.examine.forced.weights import Weights, as_complex, backward, in_dtype
from mpcompare.verdict.examine.numerics import in_part, numbers, spread
from mpcompare.verdict.examine.oracle import shares_of

DROPOUT = nn.modules.dropout._DropoutNd
REPEATED = 2.0**-7  # a repeated call may differ in 16 bits by this share of the size of what arrives


@dataclass
class Replay:
    """A replay of one recorded step."""

    step: "Recorded"
    arithmetic: Arithmetic
    choosing: Choosing = field(default_factory=Choosing)  # makes the choices of the step between layers
    is_forcing = False  # whether layers compare and pass on what was recorded
    is_open = False  # whether gradients are differentiated again, so that autograd must see the functions of all calls
    loss_is_rounded = False  # found when it has run: whether the loss is made of 16-bit numbers, and has more bits

    def __post_init__(self) -> None:
        self.dtype = self.arithmetic.dtype
        self.network = in_dtype(self.step.network, self.dtype)
        self.record, self.scale = self.step.record, self.step.scale

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return next(self.network.parameters()).device

    def run(self) -> float | None:
        """Returns the loss. It is None where nobody can tell which rows of the batches the network was called with: the
        gradients of its outputs are then the recorded ones.

        Raises:
            NotReplayedError: the network draws random numbers that the step did not draw.
        """
        self.weights = Weights(self.network, self.dtype, self.arithmetic.storage, self.arithmetic.cast)
        self.sums = GradientSums(self._calls_of_parameters(), self.weights.between, self.arithmetic.summed)
        self.arrived: dict[str, list[float]] = {}
        self.users: dict[str, set[str]] = {}  # by parameter the layers that use it between others
        self.in_fp32: dict[str, float] = {}  # by shift of a norm, or embedding, in fp32: its gradient's number of terms
        self.gains: set[str] = set()  # the gains of norms held in fp32
        self.casts: dict[str, set[torch.dtype]] = {}  # by place the formats of 16 bits that the network itself asks for
        self.detached: list[str] = []  # layers whose output passes no gradient back, and should
        self.factors = [self.scale]  # the factors of the recorded gradients, call by call of the network
        self.in_parts = False  # whether several calls of the network have one loss
        self.as_given = True  # whether the network's calls have the micro-batches, with their rows in order
        self.zero = torch.zeros((), dtype=self.dtype, device=self.device)
        calls = self.record.calls[OUTPUT]
        self.weights.held = calls[0].held if calls else {}
        self.weights.autocast = any(call.autocast for each in self.record.calls.values() for call in each)
        seed_step(EXAMINED)
        with (
            fp32_products.tf32(False),
            self._forcing(),
            self.weights,
            Fed(self.record.drawn, self.arithmetic.operand, self.choosing),
            default_dtype(self.dtype),
        ):
            loss = self.take(calls)
        for name, leaf in self.weights.between.items():
            if leaf.grad is not None:
                self.sums.add(name, self._unscaled(leaf.grad), "")
                self.sums.sources[name] |= self.users.get(name, set())
        self.hand_on(self.sums.end())
        return loss

    def take(self, calls: list[Call]) -> float | None:
        """Calls the network as the step did, with a backward after each call, and returns the loss as ``run`` does."""
        self.as_given = as_given(calls, self.step.batches)
        if not self.as_given:
            return self._take_other_rows(calls)
        loss, targets = 0.0, [y for _, y in self.step.batches]
        for call, y, share in zip(calls, targets, shares_of(self.step.loss_fn, targets), strict=True):
            part = self._loss(self._output_of(call), y) * share
            loss += part.item()
            backward([part * self.arithmetic.kept], [None])
            self.arithmetic.whose("", "")
        return loss

    def _take_other_rows(self, calls: list[Call]) -> float | None:
        """Takes a step whose calls have the batches' rows in another order, or in parts: the loss is over all rows. If
        nobody can tell which rows the calls have, the gradients at the network's outputs are the recorded ones."""
        rows, outputs = rows_of(calls, self.step.batches), [self._output_of(call) for call in calls]
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
        with self.choosing.of(call.choices if self.is_forcing else [], call.near):
            return self.network.get_submodule(part)(*args, **kwargs)

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

    def tell(self, point: Point, seen: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
        """Compares at a point, and hides that work from the modes: it is no part of the step, and they are slow."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            self.arithmetic.compare(point, seen, exact, dtype)

    def _unscaled(self, grad: Tensor) -> Tensor:
        """Returns a gradient without the part of the loss scale that it keeps."""
        if self.arithmetic.kept == 1:
            return grad
        with _disable_current_modes():
            return grad / self.arithmetic.kept

    def in_full(self, grad: Tensor) -> Tensor:
        """Returns a gradient in the dtype of the replay, without this part. At most one copy of it is made."""
        cast = grad.to(as_complex(self.dtype, grad))
        if self.arithmetic.kept == 1 or cast is grad:  # two parameters may have one gradient
            return self._unscaled(cast)
        with _disable_current_modes():
            return cast.div_(self.arithmetic.kept)

    def hand_on(self, gradients: Params) -> None:
        """Hands on gradients that are whole, and frees each of them."""
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            while gradients:
                name, gradient = gradients.popitem()
                self.whole(name, numbers(gradient))

    def whole(self, name: str, gradient: Tensor) -> None:
        """Compares the gradient of a parameter, once all of it is there. Nobody keeps it here."""
        grads = self.step.grads
        shown = grads[name] if name in grads else torch.zeros_like(gradient)
        exact = gradient if gradient.shape == shown.shape else in_part(gradient)
        self.arithmetic.compare(Point("parameter", name), shown, exact, torch.float32)

    def passed_on(self, name: str, outputs: list[Any]) -> None:
        """Is given the outputs of a layer with which the network goes on."""

    def not_called(self) -> list[str]:
        """Returns the layers that the replay called less often than the step, if a missed result had a gradient."""
        missed = {name: calls[len(self.arrived.get(name, ())) :] for name, calls in self.record.calls.items()}
        missed.pop(OUTPUT, None)
        return [name for name, calls in missed.items() if any(g is not None for call in calls for g in call.gradients)]

    def _calls_of_parameters(self) -> Counter[str]:
        """Returns by parameter the number of recorded calls of the layers that have it."""
        counts: Counter[str] = Counter()
        for name, module in self.network.named_modules():
            if name in self.record.calls and name != OUTPUT:
                calls = len(self.record.calls[name])
                counts.update({self.weights.names[id(p)]: calls for p in module.parameters()})
        return counts

    @contextmanager
    def _forcing(self) -> Iterator[None]:
        """Puts a forced forward in the place of the forward of each recorded layer, and of the network."""
        originals, hooks = {}, {}
        self.is_forcing = True
        for name, module in self.network.named_modules():
            # A layer that writes into its input would write into the record, so it shall not. A dropout in place draws
            # by another operator than a plain dropout, so it stays in place, and gets a copy.
            if hasattr(module, "inplace") and not (isinstance(module, DROPOUT) and name in self.record.calls):
                module.inplace = False
            if name in self.record.calls:
                originals[module], hooks[module] = module.forward, HooksWithin(module)
                module.forward = self._forced(name, module, hooks[module])
                hooks[module].take_off()
        whole = self.network.forward
        originals.setdefault(self.network, whole)
        self.network.forward = self._outermost(whole)
        try:
            yield
        finally:
            for module in originals:
                del module.forward
            for each in hooks.values():
                each.put_back()

    def _outermost(self, whole: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the forward of the network, whose output is compared. A forward may call itself, as a forward that is
        given a batch and returns its loss does."""
        under_way: list[Callable[..., Any]] = []

        def forward(*args: Any, **kwargs: Any) -> Any:
            if under_way:
                return whole(*args, **kwargs)
            under_way.append(whole)
            try:
                result = whole(*args, **kwargs)
                with self.choosing.within():
                    return self._output(result)
            finally:
                under_way.clear()

        return forward

    def comes_to(self, call: Call, exact: Sequence[Tensor | None]) -> None:
        """Is told that backward comes to the output of a call of the network, with the exact gradients there."""
        self.arithmetic.passing("backward")
        self.sums.end_copies()
        # Parts of one batch have one factor: a mean of means over unequal parts has a different factor in each.
        is_known = self.in_parts and len(self.factors) > 1
        self.factors.append(self.factors[-1] if is_known else factor_of(call.gradients, exact, self.factors))

    def _output(self, result: Any, part: str = OUTPUT) -> Any:
        values, spec = tree_flatten(result)
        values = list(map(self.weights.taken, values))
        number, call = self._next(OUTPUT, values)
        if call is None:
            return result
        self.arithmetic.passing("loss")
        return tree_unflatten(self._passed(At(self, part, number, call), values), spec)

    def _passed(self, at: At, values: list[Any], module: nn.Module | None = None) -> list[Any]:
        """Returns what a call passes on."""
        return (
            passed_openly(at, values) if self.is_open else list(Forced.apply(self._token(values, module), at, *values))
        )

    def _token(self, values: list[Any], module: nn.Module | None = None) -> Tensor:
        """Returns a number that requires a gradient if a layer does. The layer's inputs may require none."""
        trained = module is not None and any(p.requires_grad for p in module.parameters())
        requires = trained or any(isinstance(v, Tensor) and v.requires_grad for v in values)
        return self.zero.detach().requires_grad_(requires)

    def _forced(self, name: str, module: nn.Module, hooks: HooksWithin) -> Callable[..., Any]:
        original = module.forward

        @self.choosing.within()
        def forward(*args: Any, **kwargs: Any) -> Any:
            flat, spec = tree_flatten((args, kwargs))
            flat = list(map(self.weights.taken, flat))
            number, call = self._next(name, flat)
            is_given = any(id(p) not in self.weights.names for p in module.parameters())  # parameters that are computed
            if call is None or is_given:
                return original(*args, **kwargs)

            half = half_within(module, call.products, call.passes)

            def layer(values: list[Any], params: Params) -> list[Any]:
                # Copies, because a layer may write into its inputs. Torch's layers do so only if they say "inplace".
                writes = not is_torchs(module) or getattr(module, "inplace", False)
                given = [v.clone() if is_real(v) else v for v in values] if writes else values
                again, named = tree_unflatten(given, spec)
                forced, module.forward = module.forward, original
                limits, choosing = limits_as_recorded(call, self.dtype), self.choosing.within(call.places, call.near)
                try:
                    with limits, choosing, hooks.called(half_of(module, call)), self.weights.multiplying_in(half):
                        return tree_flatten(functional_call(module, params, again, named))[0]
                finally:
                    self._note_casts(f"output {name}")
                    module.forward = forced

            assert call.spec is not None
            self._note_casts(f"input {name}")
            at = ForcedLayer(self, name, number, call, module, layer, hooks.sources, torch.is_grad_enabled())
            outputs = self._passed(at, flat, module)
            if call.into is not None:
                outputs = [_written(flat[call.into], outputs[0])]
            self.passed_on(name, outputs)
            return tree_unflatten(outputs, call.spec)

        return forward

    def _note_casts(self, at: str) -> None:
        """Notes the formats of 16 bits that the network asked for on its way to a place."""
        self.casts.setdefault(at, set()).update(self.weights.asked)
        self.weights.asked.clear()

    def _next(self, name: str, arriving: list[Any]) -> tuple[int, Call | None]:
        """Returns the number of this call and its record. A checkpoint repeats a call with the same numbers, except for
        roundings: a product may have other last bits if its operands lie elsewhere in memory."""
        with _disable_current_modes():
            values = [spread(t).double() for t in arriving if is_real(t)]
            mark, size = (sum(float(v.sum()) for v in each) for each in (values, [v.abs() for v in values]))
        marks = self.arrived.setdefault(name, [])
        # the nearest, and of equal marks the last: the calls before it have had their backward
        number = min(range(len(marks) - 1, -1, -1), key=lambda at: abs(marks[at] - mark), default=-1)
        if not (in_backward() and marks and abs(marks[number] - mark) <= REPEATED * size):
            number = len(marks)
            marks.append(mark)
        calls = self.record.calls.get(name, [])
        return number, calls[number] if number < len(calls) else None


def _written(x: Tensor, y: Tensor) -> Tensor:
    """Writes the output of a layer into its input, as the layer did, and returns what the network goes on with. A skip
    connection may hand on this input, as in the U-Net of pix2pix, or the base of this input. A view that a function of
    ours has made stays as it is: nobody can write into it."""
    if not torch.is_grad_enabled() or (x.is_leaf and x.requires_grad):
        return y
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        try:
            return x.copy_(y) if x._is_view() else x.detach_().copy_(y)
        except RuntimeError:
            return y


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

    def new_replay(self, arithmetic: Arithmetic) -> Replay:
        """Returns a new replay of the step."""
        return Replay(self, arithmetic)
