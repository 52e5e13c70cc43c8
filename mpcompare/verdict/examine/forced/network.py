"""A network whose layers pass on what a step had there, and not what they compute."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from mpcompare.tasks.task import Params
from mpcompare.verdict.examine.forced.arithmetic import Arithmetic, Point
from mpcompare.verdict.examine.forced.call import At, ForcedLayer, half_of
from mpcompare.verdict.examine.forced.choices import Choosing, in_backward
from mpcompare.verdict.examine.forced.formats import limits_as_recorded
from mpcompare.verdict.examine.forced.function import Forced, passed_openly
from mpcompare.verdict.examine.forced.hooks import HooksWithin
from mpcompare.verdict.examine.forced.own_products import halves_within, is_torchs
from mpcompare.verdict.examine.forced.record import OUTPUT, Call, is_real
from mpcompare.verdict.examine.forced.weights import Weights, in_dtype
from mpcompare.verdict.examine.numerics import numbers, spread
from mpcompare.verdict.examine.unseen import Unseen

DROPOUT = nn.modules.dropout._DropoutNd
REPEATED = 2.0**-7  # a repeated call may differ in 16 bits by this share of the size of what arrives


@dataclass
class ForcedNetwork:
    """A copy of a network in the dtype of an arithmetic.

    Attributes:
        step: the recorded step: see :class:`Recorded`.
        choosing: makes the choices of the step between layers.
        arrived: by layer a mark of what arrived in each call.
        users: by parameter the layers that use it between others.
        in_fp32: by shift of a norm, or embedding, in fp32 the number of terms of its gradient.
        gains: the gains of norms held in fp32.
        casts: by place the formats of 16 bits that the network itself asks for.
        constants: the places whose numbers have the digits of 16 bits, and depend on no parameter.
        detached: the layers whose output passes no gradient back, and should.
    """

    step: Any
    arithmetic: Arithmetic
    choosing: Choosing = field(default_factory=Choosing)
    is_forcing = False  # whether layers compare and pass on what was recorded
    is_open = False  # whether gradients are differentiated again, so that autograd must see the functions of all calls

    def __post_init__(self) -> None:
        self.dtype, self.record = self.arithmetic.dtype, self.step.record
        self.network = in_dtype(self.step.network, self.dtype)
        self.weights = Weights(self.network, self.arithmetic, self.record.narrow, self.choosing)
        self.arrived: dict[str, list[float]] = {}
        self.users: dict[str, set[str]] = {}
        self.in_fp32: dict[str, float] = {}
        self.gains: set[str] = set()
        self.casts: dict[str, set[torch.dtype]] = {}
        self.constants: set[str] = set()
        self.detached: list[str] = []
        self.zero = torch.zeros((), dtype=self.dtype, device=self.device)

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return next(self.network.parameters()).device

    def tell(self, point: Point, seen: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
        """Compares at a point, and hides that work from the modes: it is no part of the step, and they are slow."""
        with Unseen():
            self.arithmetic.compare(point, numbers(seen), numbers(exact), dtype)

    def not_called(self) -> list[str]:
        """Returns the layers that the replay called less often than the step, if a missed result had a gradient."""
        missed = {name: calls[len(self.arrived.get(name, ())) :] for name, calls in self.record.calls.items()}
        missed.pop(OUTPUT, None)
        return [name for name, calls in missed.items() if any(g is not None for call in calls for g in call.gradients)]

    @contextmanager
    def forcing(self) -> Iterator[None]:
        """Puts a forced forward in the place of the forward of each recorded layer, and of the network."""
        self.is_forcing = True
        with ExitStack() as replaced:
            for name, module in self.network.named_modules():
                # A layer that writes into its input would write into the record, so it shall not. A dropout in place
                # draws by another operator than a plain dropout, so it stays in place, and gets a copy.
                if hasattr(module, "inplace") and not (isinstance(module, DROPOUT) and name in self.record.calls):
                    with suppress(AttributeError):  # it may be a property that nobody can write
                        module.inplace = False
                if name in self.record.calls:
                    hooks = HooksWithin(module)
                    replaced.enter_context(mock.patch.object(module, "forward", self._forced(name, module, hooks)))
                    replaced.enter_context(hooks.taken_off())
            whole = self._outermost(self.network.forward)
            replaced.enter_context(mock.patch.object(self.network, "forward", whole))
            yield

    def _outermost(self, whole: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the forward of the network, whose output is compared. A forward may call itself, as a forward that is
        given a batch and returns its loss does."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            with mock.patch.object(self.network, "forward", whole):
                result = whole(*args, **kwargs)
            with self.choosing.within():
                return self.output(result)

        return forward

    def output(self, result: Any, part: str = OUTPUT) -> Any:
        values, spec = tree_flatten(result)
        values = list(map(self.weights.taken, values))
        number, call = self._next(OUTPUT, values)
        if call is None:
            return result
        self.arithmetic.passing("loss")
        passed = zip(self._passed(At(self, part, number, call), values), values, strict=True)
        return tree_unflatten([y if isinstance(y, Tensor) else own for y, own in passed], spec)

    def _passed(self, at: At, values: list[Any], module: nn.Module | None = None) -> list[Any]:
        """Returns what a call passes on."""
        if self.is_open:
            return passed_openly(at, values)
        # The token requires a gradient if a parameter of the layer does. The layer's inputs may require none.
        given = [*values, *(module.parameters() if module is not None else ())]
        with Unseen():
            token = self.zero.detach().requires_grad_(any(isinstance(v, Tensor) and v.requires_grad for v in given))
        return list(Forced.apply(token, at, *values))

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

            halves = halves_within(module, call.products, call.passes)

            def layer(values: list[Any], params: Params) -> list[Any]:
                # Copies, because a layer may write into its inputs. Torch's layers do so only if they say "inplace".
                writes = not is_torchs(module) or getattr(module, "inplace", False)
                given = [v.clone() if is_real(v) else v for v in values] if writes else values
                again, named = tree_unflatten(given, spec)
                forward = mock.patch.object(module, "forward", original)
                limits = limits_as_recorded(call, self.dtype)
                choosing = self.choosing.within(call.places, call.near, call.choices)
                multiplying = self.weights.multiplying_in(halves)
                try:
                    with forward, limits, choosing, hooks.called(half_of(module, call)), multiplying:
                        return tree_flatten(functional_call(module, params, again, named))[0]
                finally:
                    self._note_casts(f"output {name}")

            assert call.spec is not None
            self._note_casts(f"input {name}")
            at = ForcedLayer(self, name, number, call, module, layer, hooks.sources, torch.is_grad_enabled())
            outputs = self._passed(at, flat, module)
            if call.into is not None:
                outputs = [_written(flat[call.into], outputs[0])]
            return tree_unflatten(outputs, call.spec)

        return forward

    def _note_casts(self, at: str) -> None:
        """Notes the formats of 16 bits that the network asked for on its way to a place."""
        self.casts.setdefault(at, set()).update(self.weights.asked)
        self.weights.asked.clear()

    def _next(self, name: str, arriving: list[Any]) -> tuple[int, Call | None]:
        """Returns the number of this call and its record. A checkpoint repeats a call with the same numbers, except for
        roundings: a product may have other last bits if its operands lie elsewhere in memory."""
        with Unseen():
            values = [spread(numbers(t)).double() for t in arriving if is_real(t)]
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
    with Unseen():
        try:
            return x.copy_(y) if x._is_view() else x.detach_().copy_(y)
        except RuntimeError:
            return y
