"""The tape of a loop: everything that it computes between the output of the network and ``backward``.

A loss, its division by the number of micro-batches, its scale and terms that are added to it are no part of the
network. Each function of torch is noted with what it was given, so that a replay can call it again in float64.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from traceback import walk_stack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import TreeSpec, tree_flatten
from torch.utils.weak import WeakIdKeyDictionary

from mpcompare.dtypes import HALF
from mpcompare.generators import DeviceGenerator, GeneratorStates
from mpcompare.tasks.task import Params
from mpcompare.verdict.examine.forced.kernels import functions_of
from mpcompare.verdict.examine.forced.record import Call
from mpcompare.verdict.examine.numerics import same_bits
from mpcompare.watching.attributes import Attributes
from mpcompare.watching.hooks_then import Hooks


@dataclass(eq=False)
class Slot:
    """A value of the tape."""

    first: Tensor | None = None  # the value itself where the tape did not compute it
    hidden: str = ""  # a function that it depends on and nobody saw; empty where all are known
    is_leaf: bool = False  # whether the loop may ask for a gradient of it: it is a leaf of autograd's graph


@dataclass(frozen=True)
class Own:
    """A parameter of the network, by its name."""

    name: str


@dataclass(frozen=True)
class Other:
    """A parameter that the loop has computed, such as one after a step of MAML, with its numbers."""

    slot: Slot
    numbers: Tensor


@dataclass(frozen=True)
class Inner:
    """A value that the network computes within a call and does not return, but that the loop uses. A hook may collect
    the output of a layer, or an attribute may hold an auxiliary loss."""

    slot: Slot
    value: Tensor
    module: str  # the name of the module that returns the value, or has it in an attribute
    number: int  # the number of the module's call within the call of the network; 0 for an attribute
    attribute: str  # the name of the attribute; empty for an output
    place: int  # the place of the value in the output, or in the attribute, as a flat list

    @property
    def name(self) -> str:
        """The names of the module and of the attribute."""
        return ".".join(filter(None, (self.module, self.attribute)))


@dataclass(eq=False)
class Called:
    """A call of the network, or of a part of it. It has the slots of its outputs. It has the states of the generators,
    the buffers, the plain attributes of each module, the parameters that required a gradient and the dtype of autocast
    as they were at its beginning. ``weights`` are the weights that it had. ``moves`` counts how often the loop had
    moved them without a step, ``number`` the calls of the network. ``after`` has the buffers at its end. ``inner`` are
    the values within it that the loop uses."""

    part: str  # the name of the module that the loop calls; empty: all of the network
    slots: list[Slot | None]
    generators: GeneratorStates
    buffers: dict[str, Tensor]
    attributes: Attributes
    trained: frozenset[str]
    first: dict[str, int]  # by layer the number of calls before it
    begins: int  # the number that autograd gave the last function before the functions of the network
    # by place the inputs that depend on parameters, or that the loop computes from the outputs of other calls
    given: dict[int, Slot | Own]
    weights: Params = field(default_factory=dict)
    # by name the parameters that the loop has computed, which it puts in the place of the network's for the call
    others: dict[str, Other] = field(default_factory=dict)
    foreign: bool = False  # whether its inputs require gradients
    moves: int = 0
    autocast: torch.dtype | None = None
    number: int = 0
    after: dict[str, Tensor] = field(default_factory=dict)
    layers: dict[str, list[Call]] = field(default_factory=dict)  # the calls of the layers within it
    hooks: Hooks = field(default_factory=dict)  # the hooks of the modules at its beginning
    ends: list[int] = field(default_factory=list)  # the numbers that autograd gave the functions of its outputs
    inner: list[Inner] = field(default_factory=list)
    within: frozenset[int] = frozenset()  # the numbers of the backward passes that the network takes within it
    only: frozenset[int] | None = None  # the backward passes whose gradients a replay takes; None: all
    # returns None if the graph of its outputs is gone, as it is if a loop detaches an image
    graph: Callable[[], object | None] = lambda: True

    @property
    def passes(self) -> frozenset[int]:
        """The numbers of the backward passes that have come to one of its layers since it ended."""
        layers = [call for calls in self.layers.values() for call in calls]
        return frozenset(number for call in layers for number in (call.first, *call.later)) - {-1} - self.within

    def needs(self) -> Iterator[Slot]:
        """Yields the slots that it is given."""
        yield from (each for each in self.given.values() if isinstance(each, Slot))
        yield from (each.slot for each in self.others.values())


@dataclass(eq=False)
class Op:
    """A function of torch, or of the user's own, that the loop calls."""

    func: Callable[..., Any]  # the function; the class of a function of the user's own
    # leaves, spec: its arguments; a slot, or a parameter, in the place of each tensor that depends on one
    leaves: list[Any]
    spec: TreeSpec
    hidden: str  # an unseen function that one of its arguments comes from; empty where all are known
    generator: DeviceGenerator  # the generator of its first tensor's device
    state: Tensor | None  # the state of the generator before the call; None where it drew no random numbers
    scaled: bool  # whether a ``GradScaler`` called it
    line: str  # the line of the user's code
    labels: int | None  # how many labels a loss counted
    mutates: bool  # whether it writes into its first argument
    # the slots of its results; this field and the next ones are known when it has returned
    results: list[Slot | None] = field(default_factory=list)
    dtypes: list[torch.dtype | None] = field(default_factory=list)  # the dtypes of its results
    scalar: bool = False  # whether it returned one number
    # by operator that it called the format of 16 bits of the operator's results
    short: dict[str, torch.dtype] = field(default_factory=dict)
    writes: Slot | None = None  # the slot that it wrote into; None where it wrote into nothing

    @property
    def name(self) -> str:
        return str(getattr(self.func, "__name__", self.func))

    @property
    def differentiates(self) -> bool:
        """Whether it asks for gradients that are differentiated again."""
        return self.func is torch.autograd.grad

    @property
    def has_own(self) -> bool:
        """Whether it is given a parameter of the network."""
        return any(isinstance(leaf, Own) for leaf in self.leaves)

    def returned(self, results: Sequence[Any], slots: list[Slot | None]) -> None:
        """Notes its results."""
        self.results, self.dtypes = slots, [t.dtype if isinstance(t, Tensor) else None for t in results]
        self.scalar = len(results) == 1 and isinstance(results[0], Tensor) and results[0].numel() == 1
        if self.state is not None and torch.equal(self.state, self.generator.get()):
            self.state = None

    def calls(self, operator: Any, result: Any) -> None:
        """Is told of an operator that the function has called. Whatever the function returns, autocast on a GPU lets
        some operators within it compute in 16 bits, such as the ``log_softmax`` of a ``cross_entropy``."""
        found = result if isinstance(result, (tuple, list)) else (result,)
        formats = [t.dtype for t in found if isinstance(t, Tensor) and t.dtype in HALF]
        if formats and not operator.is_view:
            self.short[operator._schema.name.partition("::")[2]] = formats[0]

    @property
    def within(self) -> dict[str, torch.dtype]:
        """By operator that computed in 16 bits its format; empty where the function's own results have 16 bits, too."""
        return self.short if set(HALF).isdisjoint(self.dtypes) else {}

    def needs(self) -> Iterator[Slot]:
        """Yields the slots that it is given."""
        yield from (leaf for leaf in self.leaves if isinstance(leaf, Slot))


@dataclass(eq=False)
class Root:
    """A call of ``backward``."""

    slots: list[Slot]  # the slots that it begins at
    gradients: list[Tensor | None]  # the gradients that it was given
    # loss, line: its loss, and the line of the user's code
    loss: float
    line: str
    hidden: str = ""  # the function, none of torch's, that the loss depends on; empty where all was seen
    # for a loss that is hidden, or may turn out so, the parameters on which it depends outside the network
    uses: frozenset[str] = frozenset()
    on_inner: bool = False  # whether it depends on inner values of the network, and not on its outputs alone
    # the numbers of its backward passes: a reentrant checkpoint has a pass of its own
    passes: frozenset[int] = frozenset()
    retains: bool = False  # whether another backward may come through the same graph


Event = Called | Op | Root


class Tape:
    """The events of a loop since its gradients were last empty.

    Attributes:
        events: the events in their order.
        under_way: the function that is being called; None between two functions.
        names: the names of the network's parameters, by ``id``.
        made_within: returns the slot of a value that the network has made within a call, and does not return.
    """

    def __init__(
        self, names: dict[int, str], copy: Callable[[Tensor], Tensor], made_within: Callable[[Tensor], Slot | None]
    ) -> None:
        self.names, self.copy, self.made_within = names, copy, made_within
        self.events: list[Event] = []
        self.under_way: Op | None = None
        self.slots: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.leaves: WeakIdKeyDictionary = WeakIdKeyDictionary()  # slots of leaves that are no parameters
        self.own: WeakKeyDictionary[Any, Op] = WeakKeyDictionary()  # by node the calls of the user's own functions

    def slot(self, tensor: Tensor, first: Tensor | None = None, hidden: str = "") -> Slot:
        """Returns a new slot of a tensor."""
        self.slots[tensor] = new = Slot(first, hidden)
        return new

    def begin(self, func: Callable[..., Any], args: Any, kwargs: Any, scaled: bool) -> tuple[Op, Tensor] | None:
        """Returns the call of a function that comes next, and its first tensor; None where no argument requires a
        gradient."""
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not any(t.requires_grad for t in tensors):
            return None
        name, first = str(getattr(func, "__name__", "")), tensors[0]
        mutates = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        mutates |= _is_in_place(func, args, kwargs)
        mutates &= not (first.is_leaf and first.requires_grad)  # as in torch.nn.init and requires_grad_
        if mutates and first not in self.slots and id(first) not in self.names:
            self.slot(first, self.copy(first))
        hidden: list[str] = []
        kept = [self.ref(leaf, hidden) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        labels, generator = _labels(name, args, kwargs), DeviceGenerator(first.device)
        why = next(iter(hidden), "")
        op = Op(func, kept, spec, why, generator, generator.get(), scaled, line_of_user(), labels, mutates)
        self.under_way = op
        return op, first

    def end(self, op: Op, first: Tensor, result: Any) -> None:
        """Notes a call where its result requires a gradient."""
        self.under_way = None
        found = tree_flatten(result)[0]
        if not op.mutates and not any(isinstance(t, Tensor) and t.requires_grad for t in found):
            return
        op.writes = self.slots.get(first) if op.mutates else None
        slots: list[Slot | None] = []
        for t in found:
            tracked = isinstance(t, Tensor) and t.requires_grad
            slots.append(None if not tracked else op.writes if t is first else self.slot(t, hidden=op.hidden))
        if op.hidden and op.writes:
            op.writes.hidden = op.hidden
        if not op.mutates and slots and slots[0] is None and isinstance(found[0], Tensor) and found[0].requires_grad:
            slots[0] = self.slots.get(found[0])  # a cast that changes nothing hands on what it was given
        op.returned(found, slots)
        self.events.append(op)

    def end_own(self, op: Op, node: Any, result: Any) -> None:
        """Notes a call of a function of the user's own. Its results are no part of the graph yet, and get their slots
        when they are used."""
        self.under_way = None
        results = result if isinstance(result, tuple) else (result,)
        op.returned(results, [None] * len(results))
        self.own[node] = op

    def _of_own(self, tensor: Tensor) -> Slot | None:
        """Returns the slot of a result of the user's own function; None for any other tensor."""
        node = tensor.grad_fn
        op = self.own.get(node) if isinstance(node, BackwardCFunction) else None
        if op is None:
            return None
        if op not in self.events:
            self.events.append(op)
        op.results[tensor.output_nr] = slot = self.slot(tensor, hidden=op.hidden)
        return slot

    def root(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None], line: str) -> Root:
        """Returns the root of a backward that begins at these tensors."""
        hidden: list[str] = []
        slots = [self.ref(t, hidden) for t in tensors]
        known = [s for s in slots if isinstance(s, Slot)]
        why = hidden[0] if hidden else "" if len(known) == len(slots) else "a tensor that no function made"
        loss = float(sum(float(t.detach().double()) for t in tensors)) if all(t.numel() == 1 for t in tensors) else 0.0
        kept = [None if g is None else self.copy(g) for g in gradients]
        root = Root(known, kept, loss, line, why)
        if why or self.own:  # a function of the user's own may compute no float64
            root.uses, root.on_inner = self._used_by(tensors)
        return root

    def _used_by(self, ends: Sequence[Tensor]) -> tuple[frozenset[str], bool]:
        """Returns the names of the parameters that some tensors depend on above the outputs of the network, and whether
        the tensors depend on the network through more than its outputs."""
        calls = [event for event in self.events if isinstance(event, Called) and event.ends]
        outputs = {node for event in calls for node in event.ends}
        names: set[str] = set()
        inner = False
        for node in functions_of(ends, outputs):
            inner |= any(event.begins < node._sequence_nr() <= max(event.ends) for event in calls)
            names.add(self.names.get(id(getattr(node, "variable", None)), ""))
        return frozenset(names - {""}), inner

    def depends(self, tensor: Tensor) -> bool:
        """Returns whether a tensor depends on parameters of the network."""
        return any(id(getattr(node, "variable", None)) in self.names for node in functions_of([tensor]))

    def ref(self, tensor: Tensor, hidden: list[str]) -> Any:
        """Returns what stands for a tensor on the tape: its slot, a parameter, or a copy. ``hidden`` is given the name
        of a function that it depends on and that nobody saw."""
        if (slot := self.slots.get(tensor) or self._of_own(tensor)) is not None:
            if slot.hidden:
                hidden.append(slot.hidden)
            return slot
        if (name := self.names.get(id(tensor))) is not None:
            return Own(name)
        if tensor.requires_grad and not tensor.is_leaf:
            if (slot := self.made_within(tensor)) is not None:
                return slot
            hidden.append(str(tensor.grad_fn.name()) if tensor.grad_fn else "a function")
        return self._leaf(tensor) if tensor.requires_grad and tensor.is_leaf else self.copy(tensor)

    def _leaf(self, tensor: Tensor) -> Slot:
        """Returns the slot of a leaf, such as an input that requires a gradient; a new one where its numbers moved."""
        known = self.leaves.get(tensor)
        if known is None or not same_bits(known.first, tensor.detach()):
            self.leaves[tensor] = known = Slot(self.copy(tensor), is_leaf=True)
        return known

    def drop_used(self, retained: Set[int]) -> None:
        """Drops everything but the calls that another backward may come through, and what may depend on them.

        Args:
            retained: the backward passes that leave the graph for others.
        """
        kept = [e for e in self.events if isinstance(e, Called) and e.passes <= retained and e.graph() is not None]
        if not kept:
            self.events = []
            return
        start = self.events.index(kept[0])
        later = [e for e in self.events[start:] if isinstance(e, Op) or e in kept]
        earlier = [e for e in self.events[:start] if isinstance(e, Op)]
        self.events = [*needed(earlier, (slot for e in later for slot in e.needs())), *later]


def is_open(events: Iterable[Event]) -> bool:
    """Returns whether autograd must see the functions of all calls in a replay: gradients are differentiated again, or
    go on from the parameters of a call."""
    return any(
        bool(event.others or event.within)
        if isinstance(event, Called)
        else isinstance(event, Op) and event.differentiates
        for event in events
    )


def of_the_network(events: Sequence[Event]) -> set[Slot]:
    """Returns the slots that depend on parameters of the network, by its calls or otherwise, or on tensors by which
    somebody may differentiate gradients."""
    asking = [e for e in events if (isinstance(e, Op) and e.differentiates) or (isinstance(e, Called) and e.within)]
    found = {slot for event in asking for slot in event.needs() if slot.is_leaf}
    for event in events:
        if isinstance(event, Called):
            found.update(slot for slot in event.slots if slot is not None)
            found.update(inner.slot for inner in event.inner)
        elif isinstance(event, Op) and (event.has_own or not found.isdisjoint(event.needs())):
            found.update(slot for slot in (*event.results, event.writes) if slot is not None)
    return found


def needed(events: Sequence[Event], slots: Iterable[Slot] = ()) -> list[Event]:
    """Returns the events on which the roots depend, and through parameters the inputs of the network.

    Args:
        slots: further slots that are needed.
    """
    wanted, own = set(slots), of_the_network(events)
    kept: list[Event] = []
    for event in reversed(events):
        if isinstance(event, Root):
            wanted.update(event.slots)
        elif isinstance(event, Called):
            wanted.update(own.intersection(event.needs()))
        else:
            if event.writes not in wanted and not wanted.intersection(event.results):
                continue
            wanted.update(event.needs())
        kept.append(event)
    return kept[::-1]


def line_of_user() -> str:
    """Returns file and line of the nearest frame that is neither torch's nor ours; empty where there is none."""
    for frame, line in walk_stack(sys._getframe(1)):
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in ("torch", "mpcompare", "contextlib"):
            return f"{frame.f_code.co_filename.rpartition('/')[2]}:{line}"
    return ""


def _is_in_place(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Returns whether a function is asked to write into its first argument, as ``relu(x, inplace=True)`` is."""
    code = getattr(func, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    if "inplace" not in names:
        return False
    place = names.index("inplace")
    return bool(args[place] if place < len(args) else kwargs.get("inplace"))


LOSSES = {
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "kl_div",
}  # fmt: skip


def _labels(name: str, args: Any, kwargs: Any) -> int | None:
    """Returns the number of labels that a loss counts: classes that are not left out, or rows."""
    if name not in LOSSES:
        return None
    target = args[1] if len(args) > 1 else kwargs.get("target")
    if not isinstance(target, Tensor):
        return None
    if name in ("cross_entropy", "nll_loss") and not target.is_floating_point():
        ignored = kwargs.get("ignore_index", -100)
        return int((target != ignored).sum())
    return target.shape[0] if target.dim() else 1
