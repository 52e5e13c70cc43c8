"""The events of a tape: calls of the network, functions of torch that a loop calls, and roots of backward passes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from mpcompare.dtypes import HALF
from mpcompare.generators import DeviceGenerator, GeneratorStates
from mpcompare.tasks.task import Params
from mpcompare.verdict.examine.forced.record import OUTPUT, Call
from mpcompare.watching.modules_then import Attributes, Hooks


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
    """A value that the network computes within a call and does not return by itself, but that the loop uses. A hook may
    collect the output of a layer, an attribute may hold an auxiliary loss, and an object that is returned may hold it.
    """

    slot: Slot
    value: Tensor
    module: str  # the name of the module that returns the value, or has it in an attribute
    number: int  # the number of the module's call within the call of the network; 0 for an attribute
    attribute: str  # the name of the attribute; empty for an output
    place: int  # the place of the value in the output, or in the attribute, as a flat list

    @property
    def name(self) -> str:
        """The names of the module and of the attribute."""
        return ".".join(filter(None, (self.module, self.attribute))) or OUTPUT


@dataclass(eq=False)
class Called:
    """A call of the network, or of a part of it."""

    part: str  # the name of the module that the loop calls; empty: all of the network
    number: int  # how often the network was called until then
    weights: Params  # the weights that it had
    moves: int  # how often the loop had moved them without a step
    # the states of the generators, and what follows, as they were at its beginning
    generators: GeneratorStates
    buffers: dict[str, Tensor]
    attributes: Attributes
    hooks: Hooks
    trained: frozenset[str]  # the parameters that required a gradient
    autocast: torch.dtype | None  # the dtype of autocast; None where there was none
    # how many weights of its modules torch had in the cache of its parametrizations; None where it kept none
    cached: int | None
    first: dict[str, int]  # by layer the number of calls before it
    begins: int  # the number that autograd gave the last function before the functions of the network
    # by place the inputs that depend on parameters, or that the loop computes from the outputs of other calls
    given: dict[int, Slot | Own]
    # by name the parameters that the loop has computed, which it puts in the place of the network's for the call
    others: dict[str, Other]
    foreign: bool  # whether its inputs require gradients
    # the slots of its outputs; this field and the next ones are known when it has ended
    slots: list[Slot | None] = field(default_factory=list)
    after: dict[str, Tensor] = field(default_factory=dict)  # the buffers at its end
    layers: dict[str, list[Call]] = field(default_factory=dict)  # the calls of the layers within it
    ends: list[int] = field(default_factory=list)  # the numbers that autograd gave the functions of its outputs
    last: int = 0  # the largest of these, and of the functions of tensors that it returns in objects
    inner: list[Inner] = field(default_factory=list)  # the values within it that the loop uses
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
    given: list[torch.dtype | None]  # the dtypes of its arguments; None where one is no tensor
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
    of_some: bool = False  # whether it was asked for the gradients of some tensors alone
    retains: bool = False  # whether another backward may come through the same graph
    # gives: the parameters whose gradients hold what it made; cleared: the ones that were cleared since, with others
    # left. Both are known when it has ended.
    gives: set[str] = field(default_factory=set)
    cleared: set[str] = field(default_factory=set)


Event = Called | Op | Root


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
        elif isinstance(event, Op):
            has_own = any(isinstance(leaf, Own) for leaf in event.leaves)
            if has_own or not found.isdisjoint(event.needs()):
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
