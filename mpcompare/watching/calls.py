"""The calls of the network in a sum of gradients that is under way, and what the loop computes of their outputs."""

import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from mpcompare import generators
from mpcompare.dtypes import dtype_name
from mpcompare.tasks.task import Params
from mpcompare.verdict.examine.forced.random_numbers import Key, Noted
from mpcompare.verdict.examine.forced.record import OUTPUT, Record, is_real, is_tracked, leaves_of
from mpcompare.verdict.examine.forced.recorder import Recorder, autocast_dtype
from mpcompare.verdict.examine.numerics import sum_of_bits
from mpcompare.verdict.examine.unseen import Unseen
from mpcompare.watching.events import Called, Event, Inner, Op, Other, Own, Root, Slot, is_open, needed, of_the_network
from mpcompare.watching.guard import Guard
from mpcompare.watching.modules_then import attribute_of, attributes_of, cached_of, hooks_of
from mpcompare.watching.reasons import Reasons
from mpcompare.watching.spool import Spool
from mpcompare.watching.tape import Tape


class Calls:
    """The calls of the network since the gradients were last empty."""

    def __init__(self, network: nn.Module, guard: Guard) -> None:
        self.network = network
        self.names = {id(p): name for name, p in network.named_parameters()}
        self.params = dict(network.named_parameters())
        self.spool = Spool()
        self.recorder = Recorder(self.spool.copy, guard, parts=True)  # writes down the calls of the layers
        self._passes = self.recorder.passes = set()  # since the last backward
        self.tape = Tape(self.names, self.spool.copy, self.made_within)
        self.weights: Params | None = None  # the weights that the network was called with; None after a step
        self.called: Params = {}  # some of their numbers
        self._latest: dict[str, int] = {}  # the sums of the bits of the weights at the last call
        self.moves = 0  # how often the loop has moved the weights between two calls, without a step
        self.count = 0  # how often the network was called, with gradients or without
        self.training = True  # whether the network was in training mode
        self.reasons = Reasons()  # why the layers cannot be replayed
        self.noted = _Noted(self, guard)  # the random numbers
        self._retained: set[int] = set()  # the backward passes since the last step that leave their graph to later ones

    def renew(self, params: Mapping[str, nn.Parameter]) -> None:
        """Is told of other parameters that the network has got."""
        self.names.clear()
        self.names.update({id(p): name for name, p in params.items()})
        self.params.clear()
        self.params.update(params)

    def hide(self, why: str) -> None:
        """Is told why the layers cannot be replayed."""
        self.reasons.add(why, self.count)

    def _take_reason(self) -> None:
        """Takes over the reason that the recorder has found, in a call or in a backward."""
        why, self.recorder.record.hidden = self.recorder.record.hidden, ""
        if why:
            self.hide(why)

    def begin(self, part: str, module: nn.Module, given: Any) -> Called:
        """Begins a call of the network, or of the part of it that has this name."""
        self.recorder.open, self.recorder.whole = [], []  # drops what a call left that stopped with an error
        self._drop_lost()
        params = dict(self.network.named_parameters())
        computed = {name: self._given(p) for name, p in params.items() if id(p) not in self.names}
        others = {n: Other(slot, self.spool.copy(params[n])) for n, slot in computed.items() if isinstance(slot, Slot)}
        own = {
            name: p if name not in others or others[name].slot.is_leaf else self.params[name]
            for name, p in params.items()
        }
        with torch.no_grad(), Unseen():
            sums = {name: sum_of_bits(p) for name, p in own.items()}
        moved = self.weights is not None and self._latest != sums
        if self.weights is None or moved:
            # A loop may move them to and fro, as sharpness-aware minimization does.
            self.called = {} if moved else {name: self.spool.some(p) for name, p in own.items()}
            self.weights = {name: self.spool.copy(p) for name, p in own.items()}
        self.moves, self._latest = self.moves + moved, sums
        self.training = module.training
        if any(map(is_lazy, params.values())):
            self.hide("the parameters of lazy modules are made in this call")
        first = {name: len(calls) for name, calls in self.recorder.record.calls.items()}
        inputs = {at: v for at, v in enumerate(tree_leaves(given)) if isinstance(v, Tensor) and v.requires_grad}
        slots = {at: self._given(v) for at, v in inputs.items()}
        trained = frozenset(name for name, p in params.items() if p.requires_grad and id(p) in self.names)
        self.recorder.life = lambda gradients: None  # a hook of autograd's graph lives as long as the graph
        return Called(
            part=part,
            number=self.count,
            weights=self.weights,
            moves=self.moves,
            generators=generators.states(next(iter(self.params.values())).device),
            buffers=self.buffers(),
            attributes=attributes_of(self.network, self.spool.copy),
            hooks=hooks_of(self.network),
            trained=trained,
            autocast=autocast_dtype(),
            cached=cached_of(self.network),
            first=first,
            begins=torch.autograd._get_sequence_nr() - 1,
            given={at: slot for at, slot in slots.items() if slot is not None},
            others=others,
            foreign=bool(inputs),
        )

    def _given(self, value: Tensor) -> Slot | Own | None:
        """Returns the slot of an input of the network that the loop has computed, or its name if the input is a
        parameter; None for any other input."""
        hidden: list[str] = []
        found = self.tape.ref(value, hidden)
        if hidden and self.tape.depends(value):
            self.hide(f"an input of the network depends on {hidden[0]}, of which no function of torch was seen")
        return found if isinstance(found, (Slot, Own)) else None

    def end(self, called: Called, result: Any, compiled: bool) -> None:
        """Ends a call. A call whose result requires no gradient is no part of a sum."""
        life, self.recorder.life = self.recorder.life, None
        values, held = tree_leaves(result), leaves_of(result)
        if not any(map(is_tracked, held)):
            return
        calls = self.recorder.record.calls
        if compiled or not calls.get(OUTPUT):
            self.hide("the network is compiled" if compiled else "nobody saw the outputs of the network")
        if self.recorder.scripts:
            self.hide(f"{self.recorder.scripts[0] or 'the network'} is a script of torch.jit")
        self._take_reason()
        called.layers = {name: own for name, each in calls.items() if (own := each[called.first.get(name, 0) :])}
        called.within = called.passes
        self._passes -= called.within
        called.after = self.buffers()
        called.slots = [self.tape.slot(v) if is_tracked(v) else None for v in values]
        called.ends = [v.grad_fn._sequence_nr() for v in values if is_real(v) and v.grad_fn is not None]
        nodes = [v.grad_fn for v in held if is_real(v) and v.grad_fn is not None]
        called.last = max((node._sequence_nr() for node in nodes), default=0)
        if nodes:  # else it returns a parameter
            called.graph = weakref.ref(life)
            for node in nodes:
                node.register_prehook(life)
        self.tape.events.append(called)

    def made_within(self, tensor: Tensor) -> Slot | None:
        """Returns the slot of a value that the network has made within a call; None for any other value. The call keeps
        the value as one of its inner values."""
        assert tensor.grad_fn is not None
        began = tensor.grad_fn._sequence_nr()
        called = next((c for c in self.made() if c.begins < began <= c.last), None)
        if called is None:
            return None
        if (made := self.recorder.makers.get(tensor)) is not None:
            module, number, place = made
            attribute = ""
        elif (found := attribute_of(self.network, tensor)) is not None:
            module, attribute, place = found
            number = 0
        else:
            return None
        slot = self.tape.slot(tensor)
        called.inner.append(Inner(slot, self.spool.copy(tensor), module, number, attribute, place))
        return slot

    def buffers(self) -> Params:
        """Returns copies of the network's buffers."""
        return {name: self.spool.copy(b) for name, b in self.network.named_buffers()}

    def passed(self, retains: bool, root: Root | None = None) -> None:
        """Is told that a backward has come to its end. If it has no root, the loop asked for some gradients alone."""
        self._take_reason()
        passes = frozenset(self._passes)
        self._passes.clear()
        self._retained |= passes if retains else set()
        if root is not None:
            root.passes = passes
            self.tape.events.append(root)
            self.reasons.age()

    def concerns(self, root: Root, tensors: Sequence[Tensor]) -> bool:
        """Returns whether a backward may come to the network."""
        known = not of_the_network(self.tape.events).isdisjoint(root.slots)
        return bool(root.hidden) or known or any(map(self.tape.depends, tensors))

    def roots(self) -> list[Root]:
        """Returns the backward passes."""
        return [event for event in self.tape.events if isinstance(event, Root)]

    def made(self) -> list[Called]:
        """Returns the calls."""
        return [event for event in self.tape.events if isinstance(event, Called)]

    def drop_used(self) -> None:
        """Drops everything but the calls that another backward may come through."""
        self.tape.drop_used(self._retained)
        calls = self.made()
        self.reasons.drop(min((called.number for called in calls), default=self.count + 1))
        if not calls:
            self.noted.drawn = {}
        self._record_anew()

    def _drop_lost(self) -> None:
        """Drops the calls that no backward has come through, and none can: their graph is gone, as in an evaluation."""
        lost = [called for called in self.made() if called.graph() is None and not called.passes]
        if lost:
            self._take_reason()
            self.tape.events = [event for event in self.tape.events if event not in lost]
            self._record_anew()

    def _record_anew(self) -> None:
        """Lets the record have only the calls that are left."""
        self.recorder.record = Record(drawn=self.noted.drawn)
        for called in self.made():
            _add(called, self.recorder.record)
        if not self.recorder.record.calls:
            self.recorder.others.clear()

    def of_sum(self, names: Set[str] | None = None) -> tuple[Record, list[Event], list[Called]]:
        """Returns the record of the layers, the tape, and the calls that a backward has come through.

        Args:
            names: the parameters that a backward must have given gradients to; None: any.
        """
        others = {root for root in self.roots() if names is not None and root.gives.isdisjoint(names)}
        passes = {number for root in self.roots() if root not in others for number in root.passes}
        # A loop may detach the output of a network. The inputs of such a call are no part of the sum.
        unused = {c for c in self.made() if not (c.passes if names is None else c.passes & passes)}
        tape = [replace(e) if isinstance(e, Called) else e for e in self.tape.events if e not in unused | others]
        tape = needed(tape)
        own, used = of_the_network(tape), [event for event in tape if isinstance(event, Called)]
        if names is not None and (is_open(tape) or any(e.cleared & names for e in tape if isinstance(e, Root))):
            self.hide("the gradients of some parameters were cleared, and others were not")
        for called in used:
            called.given = {at: v for at, v in called.given.items() if isinstance(v, Own) or v in own}
            called.others = {name: v for name, v in called.others.items() if v.slot in own}
        record = Record(defaultdict(list), self.noted.drawn, self.noted.constants.at)
        try:
            tape = _one_call_each(tape)
        except NotImplementedError as error:
            self.hide(f"two backward passes go through one call of the network, and {error} writes into its output")
        for event in tape:
            if isinstance(event, Called):
                _add(event, record)
        return record, tape, used

    def autocast(self, record: Record) -> str:
        """Returns the dtype of autocast, which the network may enter itself; empty where there was none."""
        layers = [call.autocast for name, calls in record.calls.items() if name != OUTPUT for call in calls]
        outside = [called.autocast for called in self.made()]
        return next((dtype_name(dtype) for dtype in layers + outside if dtype is not None), "")

    def moved_on(self) -> None:
        """Is told that a step has moved the weights."""
        self.weights, self.called, self._latest = None, {}, {}
        self._retained.clear()


def _add(called: Called, record: Record) -> None:
    """Adds the calls of the layers in one call of the network to a record."""
    for name, calls in called.layers.items():
        passes = called.only
        record.calls[name] += calls if passes is None else [each.of_passes(passes) for each in calls]


def _one_call_each(tape: Sequence[Event]) -> list[Event]:
    """Returns a tape on which each call of the network has one backward pass at most.

    Several losses may go back through one call, ``backward(retain_graph=True)``, and a replay goes back through each
    call once. So the tape has the call once more for each further pass, and what the loop computed of it for the loss.
    An open replay goes back through each call as often as the loop did.
    """
    if is_open(tape):
        return list(tape)
    through = {
        called: [root for root in tape if isinstance(root, Root) and root.passes & called.passes]
        for called in tape
        if isinstance(called, Called)
    }
    again = {root: _gone_through(root, through) for root in tape if isinstance(root, Root)}
    made: list[Event] = []
    for place, event in enumerate(tape):
        if isinstance(event, Called):
            first = next(iter(through[event]), None)
            # Without a root, torch.autograd.grad asked for its gradients: they are in no parameter's gradient.
            made.append(replace(event, only=frozenset() if first is None or event in again[first] else first.passes))
        elif isinstance(event, Root):
            if calls := again[event]:
                played = [*calls, *_of_calls(calls, tape[: place + 1])]
                both = [each for each in tape[:place] if each in played]
                made += [replace(each, only=event.passes) if isinstance(each, Called) else each for each in both]
            made.append(event)
        else:
            made.append(event)
    return made


def _gone_through(root: Root, through: Mapping[Called, list[Root]]) -> list[Called]:
    """Returns the calls that a root goes back through and an earlier root did, and the calls between them and the root.
    Two heads have one trunk: the call of the second head goes on from the second copy of the trunk's call."""
    found: list[Called] = []
    for called, roots in through.items():
        if root in roots[1:] or (found and root in roots and any(True for _ in called.needs())):
            found.append(called)
    return found


def _of_calls(calls: Sequence[Called], tape: Sequence[Event]) -> list[Op]:
    """Returns what the root at the end of a tape needs of some calls of the network.

    Raises:
        NotImplementedError: some of it is written into.
    """
    slots = {slot for called in calls for slot in called.slots if slot is not None}
    slots |= {inner.slot for called in calls for inner in called.inner}
    found = []
    for event in needed([each for each in tape[:-1] if not isinstance(each, Root)] + [tape[-1]]):
        if isinstance(event, Op) and slots.intersection(event.needs()):
            if event.writes is not None:
                raise NotImplementedError(event.line)
            slots |= {slot for slot in event.results if slot is not None}
            found.append(event)
    return found


class _Noted(Noted):
    """The random numbers of a loop, and the results of the operators that its functions are made of."""

    def __init__(self, calls: Calls, guard: Guard) -> None:
        note = partial(guard, calls.recorder.chose)
        record = calls.recorder.record
        super().__init__(record.drawn, calls.spool.copy, note, record.narrow)
        self.calls, self.guard = calls, guard
        self.on = True  # whether the look is under way

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.on:
            return func(*args, **(kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if (op := self.calls.tape.under_way) is not None and not self.guard.calls:
            op.calls(func, result)
        return result

    def drew(self, key: Key, func: Any, given: Any, numbers: list[Any], drawn_from: Any) -> list[Any]:
        self.guard(super().drew, key, func, given, numbers, drawn_from)
        return numbers

    def drew_by_itself(self, func: Any) -> None:
        if torch.is_grad_enabled() and self.calls.recorder.open:
            self.calls.hide(f"the dropout within {func.name()} has random numbers of its own")
