"""The hooks that write a record down while a step is taken. The step computes the same bits as without them."""

import operator
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from mpcompare.tasks.cast import NORMS
from mpcompare.verdict.examine.forced.arrivals import Arrivals
from mpcompare.verdict.examine.forced.choices import Choice, chosen, in_backward, line_of_the_network, numbers_of
from mpcompare.verdict.examine.forced.copies import Copies
from mpcompare.verdict.examine.forced.kinks import KINKED, operands
from mpcompare.verdict.examine.forced.module_hooks import Hook, HooksOn, put_on, takes_hooks
from mpcompare.verdict.examine.forced.own_products import OPERATORS, format_of, is_torchs
from mpcompare.verdict.examine.forced.random_numbers import Noted, copied
from mpcompare.verdict.examine.forced.record import Call, Record, is_real, is_tracked, leaves_of, tensors_in
from mpcompare.verdict.judge.replayed import OUTPUT


@contextmanager
def recorded(network: nn.Module) -> Iterator[Record]:
    """Yields the record of the step that is taken while it is entered. The step computes the same bits as without, but
    for the derivatives that torch has other formulas for: see ``passes.unrecorded``."""
    recorder = Recorder()
    recorder.attach(network)
    try:
        record = recorder.record
        with Noted(record.drawn, note=recorder.chose, narrow=record.narrow):
            yield record
    finally:
        recorder.detach()


class Recorder(Arrivals):
    """Writes down the calls of the layers of a network.

    Attributes:
        parts: whether the parts of the network may be called by themselves, each as a network.
        copies: the copies of outputs that a layer makes others of.
        others: the names of the modules that were no layer in a call. They are none in later calls of the record,
            either: the calls of a layer have the numbers that they have in a replay.
        scripts: the names of the modules that take no hooks, since they are scripts of torch.jit.
        makers: by tensor the module that returned it last, the number of the module's call within the call of the
            network, and the place of the tensor among the outputs.
    """

    def __init__(
        self, copy: Callable[[Tensor], Tensor] = copied, guard: Callable[..., Any] = operator.call, parts: bool = False
    ) -> None:
        super().__init__(copy, guard)
        self.parts, self.copies = parts, Copies()
        self.others: set[str] = set()
        self.scripts: list[str] = []
        self.makers: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._counts: Counter[str] = Counter()  # by module the number of its calls within the call of the network
        self.before: dict[str, int] = {}  # by layer the number of its calls before the call of the network
        self.buffers: list[tuple[str, Tensor, int]] = []  # the buffers then, and how often each had been written to
        self._on: HooksOn = {}
        self._repeats: set[int] = set()  # the numbers of the backward passes that repeat calls
        self.open: list[Call | None] = []  # the modules that are being called; None: a module that has called another
        self._choices: list[Choice] = []  # the choices of a module that is being called, which may be a layer

    def attach(self, network: nn.Module) -> None:
        """Puts hooks on all modules of a network that take them, have none yet, and are not within its norms."""
        self.network, within = network, _within_norms(network)
        self.scripts = [name for name, module in network.named_modules() if not takes_hooks(module)]
        modules = [each for each in network.named_modules() if each[1] not in within and takes_hooks(each[1])]
        put_on(self._on, modules, self._hooks_on)

    def _hooks_on(self, name: str, module: nn.Module) -> list[RemovableHandle]:
        called, returned = (Hook(module, partial(self.guard, method, name)) for method in (self.called, self.returned))
        return [
            module.register_forward_pre_hook(called, with_kwargs=True),
            module.register_forward_hook(returned, with_kwargs=True),
        ]

    def detach(self) -> None:
        """Removes all hooks that are not freed with their graph."""
        put_on(self._on, [], self._hooks_on)
        for handle in self.handles:
            handle.remove()

    def called(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if is_transformed():
            self.record.hidden = self.record.hidden or f"{name or 'the network'} is called by a function of torch.func"
            return
        if whole := self._is_whole(name):
            buffers = self.network.named_buffers()
            self.buffers = [(each, b, -1 if b.is_inference() else b._version) for each, b in buffers]
        if self.open:
            self._give_to_network(self.open[-1])
            self.open[-1] = None
        if torch.is_inference_mode_enabled():  # no part of a step
            return
        given, own = tree_flatten((args, kwargs))[0], dict(module.named_parameters())
        tracked = any(isinstance(t, Tensor) and t.requires_grad for t in (*given, *own.values()))
        held = {name: p.dtype for name, p in own.items()}
        if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.is_nested for t in given):
            self.record.hidden = self.record.hidden or f"{name or 'the network'} is given a nested tensor"
        call = Call([self._kept(value) for value in given], held=held, tracked=tracked, marks=_marks(given))
        call.arguments, call.begins = tree_flatten((args, kwargs))[1], torch.autograd._get_sequence_nr()
        call.autocast = autocast_dtype()
        call.without = not torch.is_grad_enabled() and not in_backward() and _without_gradient()
        call.trained = frozenset(name for name, p in own.items() if p.requires_grad)
        self.open.append(call)
        if whole:
            held = {each: p.dtype for each, p in self.network.named_parameters()} if name else held
            self.whole.append(replace(call, held=held, choices=[], later={}, products=defaultdict(set)))
            self._counts.clear()
            self.before = {each: len(calls) for each, calls in self.record.calls.items()}

    def returned(self, name: str, module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        if torch.is_inference_mode_enabled() or is_transformed():
            self._note_aside(name)
            return result
        call, first = self.open.pop(), not in_backward()
        is_other = first and name in self.others
        if call is not None and (is_other or any(map(_is_hidden, (*call.inputs, *tree_flatten(result)[0])))):
            self._give_to_network(call)  # the record cannot hold all that the module is given or returns
            call = None
        if call is not None and not is_torchs(module):
            call.choices = [each for each in self._choices if each.place[-1] in KINKED]
        self._choices.clear()  # other choices of a layer are its own
        # A module may hand on one of its arguments as it is, like ``nn.Identity``, or a view of one, like
        # ``nn.Flatten``. The record of the argument is then the record of the result: what is written into one of the
        # two is written into the other.
        is_layer = call is not None and call.marks.isdisjoint(_marks(tree_flatten(result)[0]))
        if first and not is_layer and torch.is_grad_enabled():
            self.others.add(name)
        if call is not None and is_layer:
            given = tree_flatten((args, kwargs))[0]
            call.into = next((at for at, v in enumerate(given) if v is result and isinstance(v, Tensor)), None)
            result = self._keep(name, call, result)
        if first:
            self._note_makers(name, result)
        if self._is_whole(name):
            result = self._keep(OUTPUT, self.whole.pop(), result)
            if not any(map(is_tracked, leaves_of(result))):  # a look at the network, and no part of the step
                self._note_aside(name)
                for each, calls in self.record.calls.items():
                    del calls[self.before.get(each, 0) :]
        return result

    def _note_aside(self, name: str) -> None:
        """Notes which buffers a call of the network has written that is no part of the step. A replay has no such
        call."""
        if self._is_whole(name):
            now = dict(self.network.named_buffers())
            same = {
                n for n, b, writes in self.buffers if now.get(n) is b and not b.is_inference() and b._version == writes
            }
            self.record.aside |= now.keys() - same

    def _note_makers(self, name: str, result: Any) -> None:
        """Notes which module returned a tensor. A module may return an object that holds what another one has made."""
        nest = len(tree_flatten(result)[0])
        for place, value in enumerate(leaves_of(result)):
            if is_tracked(value) and (place >= nest or name):
                made = name, self._counts[name], place
                self.makers[value] = made if place < nest else self.makers.get(value, made)
        self._counts[name] += 1

    def chose(self, func: Any, args: Any, result: Any) -> None:
        """Is told of an operation that chooses, or multiplies, and of one with kinks before it has a result, which is
        None then. A checkpoint makes the choices of a layer once more."""
        if func._schema.name in OPERATORS:
            kind, calls = format_of(args), [*self.open[-1:], *self.whole[-1:]]
            if kind is not None and (call := next(filter(None, calls), None)) is not None:
                call.products[line_of_the_network()].add(kind)
            return
        if not self.whole or not self.open or in_backward():
            return
        choices = self.whole[-1].choices if self.open[-1] is None else self._choices
        if result is None:
            place, nothing = (*line_of_the_network(), func._schema.name.removesuffix("_")), torch.empty(0)
            # A replay has the output of a layer as it was, if nobody has written into it since.
            given = [nothing if x in self.makers and x._version == 0 else self.copy(x) for x in operands(args)]
            choices.extend(Choice(place, x, x.dtype, nothing) for x in given)
        elif (made := chosen(args, result)) is not None:
            numbers = numbers_of(args)
            numbers = self.copy(numbers) if len(numbers) else numbers
            place = *line_of_the_network(), func._schema.name
            choices.append(Choice(place, self.copy(made), args[0].dtype, numbers))

    def _give_to_network(self, call: Call | None) -> None:
        """Takes a module for no layer: its choices and products are work between the layers of the network."""
        if self.whole:
            self.whole[-1].choices += self._choices
            for line, kinds in call.products.items() if call else ():
                self.whole[-1].products[line] |= kinds
        self._choices.clear()

    def _is_whole(self, name: str) -> bool:
        """Returns whether a call is a call of the network, and not a call within it."""
        return (not name or (self.parts and not self.open)) and not in_backward()

    def _keep(self, name: str, call: Call, result: Any) -> Any:
        """Keeps the outputs of a call, and returns them, or copies of some: see ``Copies``."""
        values, call.spec = tree_flatten(result)
        call.outputs = [None if tensors_in(v) else self._kept(v) for v in values]  # an object would hold the graph
        listened = self.copies.of(values, call.begins)
        if any(a is not b for a, b in zip(listened, values, strict=True)):
            values, result = listened, tree_unflatten(listened, call.spec)
        call.gradients = [None] * len(values)
        call.passes = list(map(is_tracked, values))
        if in_backward():
            call = self._first_run(name, call)
        else:
            self.record.calls[name].append(call)
        for place, value in enumerate(values):
            if is_tracked(value):
                self.listen(name, call, place, value)
        return result

    def _kept(self, value: Any) -> Any:
        return self.copy(value) if isinstance(value, Tensor) else value

    def _first_run(self, name: str, again: Call) -> Call:
        """Returns the call that a checkpoint repeats: it has the same inputs. It may have been without gradients. A
        function of somebody's own that begins with a call of other inputs repeats none."""
        number = torch._C._current_graph_task_id()
        for call in self.record.calls[name]:
            pairs = zip(call.inputs, again.inputs, strict=False)
            if all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor)):
                call.passes = again.passes
                call.again = [v.dtype for v in again.outputs if is_real(v)]
                self._repeats.add(number)
                return call
        if number not in self._repeats and not self.record.hidden and not _in_checkpoint():
            other = f"backward calls {name} with other numbers than forward did"
            self.record.hidden = f"{other}, as the adjoint of a differential equation does"
        return again


def _within_norms(network: nn.Module) -> set[nn.Module]:
    """Returns the modules without parameters that only norms have within them, such as an activation."""
    norms = {m for m in network.modules() if isinstance(m, NORMS)}
    within = {each for norm in norms for each in norm.modules() if each is not norm and not list(each.parameters())}
    others = set(network.modules()) - norms - within
    return within - {each for other in others for each in other.children()}


def is_transformed() -> bool:
    """Returns whether a function of torch.func, such as ``vmap``, calls us. Tensors then have no numbers of their
    own."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def autocast_dtype() -> torch.dtype | None:
    """Returns the dtype of the autocast that is entered; None where there is none."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return torch.get_autocast_dtype(kinds[0]) if kinds else None


def _without_gradient() -> bool:
    """Returns whether a reentrant checkpoint calls us whose arguments require no gradient: its backward never comes."""
    for frame, _ in walk_stack(sys._getframe(1)):
        if frame.f_code is checkpoint.CheckpointFunction.forward.__code__:
            return not any(isinstance(v, Tensor) and v.requires_grad for v in frame.f_locals["args"])
    return False


def _in_checkpoint() -> bool:
    """Returns whether a checkpoint of torch's calls us."""
    return any(frame.f_globals.get("__name__") == checkpoint.__name__ for frame, _ in walk_stack(sys._getframe(1)))


def _is_hidden(value: Any) -> bool:
    """Returns whether a value is a tensor of complex numbers, as a Fourier transform returns it, a nested tensor, or an
    object that has tensors, as an instance of a dataclass. A record holds real numbers, and nests that torch knows."""
    if isinstance(value, Tensor):
        return value.is_complex() or value.is_nested
    return bool(tensors_in(value))


def _marks(values: Iterable[Any]) -> set[tuple[int, int]]:
    """Returns where the numbers of each tensor are in memory, and how often the tensor was written to."""
    dense = [v for v in values if isinstance(v, Tensor) and v.layout is torch.strided and not v.is_inference()]
    return {(t.untyped_storage().data_ptr(), t._version) for t in dense if t.numel() > 0}
