"""The forced replay of a watched sum of gradients, from the root of each backward on."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from mpcompare import generators
from mpcompare.contract import Batches
from mpcompare.dtypes import HALF
from mpcompare.tasks.losses import Loss
from mpcompare.tasks.task import Params
from mpcompare.verdict.examine.errors import gradient_error
from mpcompare.verdict.examine.forced.arithmetic import Arithmetic, Point
from mpcompare.verdict.examine.forced.instead import Instead
from mpcompare.verdict.examine.forced.kernels import Kernels
from mpcompare.verdict.examine.forced.random_numbers import NotReplayedError
from mpcompare.verdict.examine.forced.record import Call, leaves_of
from mpcompare.verdict.examine.forced.replay import Recorded
from mpcompare.verdict.examine.forced.weights import backward
from mpcompare.verdict.examine.numerics import same_bits
from mpcompare.verdict.examine.unseen import Unseen
from mpcompare.verdict.judge.errors import GradientError
from mpcompare.watching.derivatives import Derivatives
from mpcompare.watching.events import Called, Inner, Op, Root, Slot, is_open, needed
from mpcompare.watching.modules_then import set_attributes
from mpcompare.watching.playing import Player
from mpcompare.watching.steps import Sum, moved


@dataclass(frozen=True)
class RecordedSum(Recorded):
    """A recorded sum of gradients. Its exact replay finds ``shares`` and ``own``."""

    sum: Sum
    derivatives: Derivatives  # the derivatives of the user's own functions; the exact replay finds out which are wrong
    kernels: Kernels  # what torch's own layers make of the recorded operands
    # for each loss that a root is made of, the derivative of the root by this loss; None in the place of a loss is the
    # loss that the network takes itself
    shares: list[tuple[Op | None, float]] = field(default_factory=list)
    # the errors of the kernels' gradients, where no other layer has a part in these
    own: dict[str, GradientError | None] = field(default_factory=dict)

    def new_replay(self, arithmetic: Arithmetic) -> "FromTheRoot":
        return FromTheRoot(self, arithmetic)


def recorded_sum(seen: Sum, network: nn.Module, derivatives: Derivatives, kernels: Kernels) -> RecordedSum:
    """Returns a sum as a recorded step of a network that is as it was then."""
    hidden = any(root.hidden for root in seen.roots)
    loss = 0.0 if hidden else sum(root.loss for root in seen.roots)  # a hidden loss is not judged
    grads, batches = {name: g.part for name, g in seen.grads.items()}, cast(Batches, [None] * len(seen.roots))
    known, no_loss = (seen, derivatives, kernels), cast(Loss, None)  # the loss of a loop is on its tape
    return RecordedSum(seen.record, network, no_loss, batches, loss, grads, 1.0, seen.buffers_after, *known)


@dataclass
class FromTheRoot(Player):
    """A replay that plays a tape: it calls the network where the loop did, and computes what the loop computed of it.

    Attributes:
        step: the sum whose tape it plays.
    """

    step: RecordedSum

    def whole(self, name: str, gradient: Tensor) -> None:
        """Compares the gradient that torch's own layers make with the exact one, and hands the gradient on."""
        kernels = self.step.kernels
        if self.arithmetic.is_exact and name in kernels.grads and self.sums.sources[name] <= kernels.layers:
            self.step.own[name] = gradient_error(kernels.grads[name], gradient)
        super().whole(name, gradient)

    def comes_to(self, call: Call, exact: Sequence[Tensor | None]) -> None:
        """Is told that backward comes to the output of a call. The loss scale is on the tape, and calls before one root
        may have one copy of a parameter in 16 bits."""
        self.arithmetic.passing("backward")

    def take(self, calls: list[Call]) -> float | None:
        """Plays the tape, with the derivatives of the user's own functions."""
        self.is_open = is_open(self.step.sum.tape)
        with nullcontext() if self.is_open else self.step.derivatives.taken(self, self.arithmetic.is_exact):
            return self._take(calls)

    def _take(self, calls: list[Call]) -> float | None:
        """Plays the tape. Where the loss is hidden, it passes back the gradients that arrived at the outputs of the
        network."""
        values: dict[Slot, Tensor] = {}
        self.latest: Called | None = None
        self.cache: dict[Any, Any] = {}  # the weights that parametrizations keep from call to call
        self.times_made: Counter[tuple[str, int]] = Counter()  # how often each inner value was made
        seen, events = self.step.sum, self.step.sum.tape
        self.written = {op.writes for op in seen.ops if op.writes is not None}
        self.uses = Counter(slot for event in events if not isinstance(event, Root) for slot in event.needs())
        number, loss, self.exact = 0, 0.0, 0.0
        losses: list[tuple[Op | None, Tensor]] = []
        if any(root.hidden for root in seen.roots):
            if self.is_open:
                raise NotReplayedError("a loss that has gradients of gradients depends on a function that nobody saw")
            for begin, call in zip(seen.calls, calls, strict=True):
                self._backward(call, self._called(replace(begin, given={}), call, values))
            return None
        between = set(needed([event for event in events if not isinstance(event, Root)]))
        for event in events:
            if isinstance(event, Called):
                outputs = tree_leaves(self._called(event, calls[number], values))
                number += 1
                for slot, value in zip(event.slots, outputs, strict=True):
                    if slot is not None:
                        values[slot] = value
                        if value.numel() == 1 and value.requires_grad:
                            losses.append((None, value))
            elif isinstance(event, Op):
                is_between = event in between  # two calls: it is rounded as the work between two layers is
                # A function that casts to 16 bits is rounded as a whole: the replay casts nothing.
                is_short = not set(HALF).isdisjoint(event.dtypes) or "_to_copy" in event.within
                self.loss_is_rounded |= bool(event.within)
                self.arithmetic.passing("forward" if is_between or is_short else "loss")
                self.arithmetic.whose("forward" if is_between else "", "")
                within = () if is_between or is_short else event.within
                self.play(event, values, is_short and not is_between, within)
                result = event.results[0] if event.results else None
                if event.labels is not None and event.scalar and result is not None:
                    losses.append((event, values[result]))
            else:
                self.arithmetic.passing("loss")
                for _, value in losses:
                    value.retain_grad()
                self.back(event, values)
                if self.is_forcing:
                    with Unseen():
                        self.sums.end_copies()
                loss += event.loss
                if self.arithmetic.is_exact:
                    self.step.shares.extend((op, float(v.grad)) for op, v in losses if v.grad is not None)
                losses = []
                self.arithmetic.whose("", "")
        coarse = any(set(op.dtypes) & set(HALF) for op in seen.ops)
        return loss if coarse else self.exact

    def _called(self, event: Called, call: Call, values: dict[Slot, Tensor]) -> Any:
        """Calls the network as it was called then, keeps its inner values, and returns its output."""
        generators.put_back(event.generators, self.device)
        set_attributes(self.network, event.attributes, self.dtype)
        with torch._C.DisableTorchFunction():  # a loss of the generator may freeze the discriminator for its call
            for name, p in self.network.named_parameters():
                p.requires_grad_(name in (event.trained | event.others.keys()) & self.step.sum.owned)
        own = {name: event.weights[name] for name in moved(self.step.sum.weights, event.weights)}
        self.weights.moved = own | self._others(event, values)
        if self.latest is not None:  # the loop may have called the network in between, without gradients
            _move_buffers(self.network, self.latest.after, event.buffers)
        self.latest = event
        self.arithmetic.passing("forward")
        self.arithmetic.whose("forward", "")
        computed = {at: self.leaf(leaf, values) for at, leaf in event.given.items()}
        if any(getattr(call.inputs[at], "shape", None) != value.shape for at, value in computed.items()):
            raise NotReplayedError("a wrapper changes what the network is given")
        with self._keeping(event.inner, values), self._cached(event.cached):
            result = self.call(call, computed, event.part)
        self.weights.moved = own
        return self.output(result, event.part) if event.part and self.is_forcing else result

    def _others(self, event: Called, values: dict[Slot, Tensor]) -> Params:
        """Compares the parameters that the loop has computed for a call, and returns those that go on from its own."""
        made: Params = {}
        for place, (name, other) in enumerate(event.others.items(), start=1):
            layer, value = name.rpartition(".")[0], self.leaf(other.slot, values)
            if layer in self.record.calls:
                point = Point("input", layer, len(self.arrived.get(layer, ())), -place)
                self.tell(point, other.numbers, value.detach(), other.numbers.dtype)
            made[name] = Instead.apply(value, self.arithmetic.operand(other.numbers.to(value.dtype)))
        return made

    def _cached(self, count: int | None) -> AbstractContextManager[Any]:
        """Lets torch keep the weights of parametrizations as it did in a call, which found so many weights of earlier
        calls."""
        self.cache = self.cache if count else {}
        if len(self.cache) < (count or 0):
            raise NotReplayedError("parametrize.cached() keeps weights that were computed before these gradients")
        return mock.patch.multiple(parametrize, _cache_enabled=int(count is not None), _cache=self.cache)

    @contextmanager
    def _keeping(self, inner: Sequence[Inner], values: dict[Slot, Tensor]) -> Iterator[None]:
        """Keeps the inner values of the call of the network that is made while it is entered."""
        outputs: dict[str, list[Any]] = {each.module: [] for each in inner if not each.attribute}  # of all its calls
        with ExitStack() as hooks:
            for name, own in outputs.items():
                module = self.network.get_submodule(name)
                hooks.enter_context(module.register_forward_hook(lambda _, __, y, own=own: own.append(leaves_of(y))))
            yield
        for each in inner:
            if each.attribute:
                made = tree_leaves(vars(self.network.get_submodule(each.module))[each.attribute])
            else:
                made = outputs[each.module][each.number]
            values[each.slot] = self._gone_on_from(each, made[each.place])

    def _gone_on_from(self, inner: Inner, value: Tensor) -> Tensor:
        """Compares an inner value with the loop's value, and goes on from the loop's value, as at a layer."""
        if not inner.attribute and inner.module in self.record.calls:
            return value
        number = self.times_made[inner.name, inner.place]
        self.times_made[inner.name, inner.place] += 1
        exact = value.detach()
        self.tell(Point("output", inner.name, number, inner.place), inner.value, exact, inner.value.dtype)
        with Unseen():
            moved = self.arithmetic.operand(inner.value.to(self.dtype)) - exact
        return value + moved

    def back(self, root: Root, values: Mapping[Slot, Tensor]) -> None:
        """Takes a backward from a root."""
        ends = [values[slot] for slot in root.slots]
        grads = [None if g is None else g.to(self.dtype) for g in root.gradients]
        if all(end.numel() == 1 for end in ends):
            self.exact += sum(float(end.detach()) for end in ends)
        if self.is_open:  # the gradients of gradients come first, at no output
            self.arithmetic.passing("backward")
        backward(ends, grads, self.is_open)


def _move_buffers(network: nn.Module, left: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Gives a network the buffers that a call found, if the call before it left other buffers."""
    for prefix, module in network.named_modules():
        for name, b in module._buffers.items():
            full = f"{prefix}.{name}" if prefix else name
            if b is not None and full in left and full in found and not same_bits(left[full], found[full]):
                module._buffers[name] = found[full].to(b.dtype)
