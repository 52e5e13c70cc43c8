"""The tape of a loop: everything that it computes between the output of the network and ``backward``.

A loss, its division by the number of micro-batches, its scale and terms that are added to it are no part of the
network. Each function of torch is noted with what it was given, so that a replay can call it again in float64.
"""

import sys
from collections.abc import Callable, Sequence, Set
from traceback import walk_stack
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch._C import TensorBase
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakIdKeyDictionary

from mpcompare.generators import DeviceGenerator
from mpcompare.tasks.functions import writes_into_first
from mpcompare.verdict.examine.forced.kernels import functions_of
from mpcompare.verdict.examine.numerics import same_bits
from mpcompare.watching.events import Called, Event, Op, Own, Root, Slot, needed

READS = vars(TensorBase)["grad"].__get__  # reads the gradient of a tensor


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
        mutates = writes_into_first(func) or _is_in_place(func, args, kwargs)
        mutates &= not (first.is_leaf and first.requires_grad)  # as in torch.nn.init and requires_grad_
        is_new = mutates and first not in self.slots and id(first) not in self.names
        if is_new and not (first.requires_grad and self.made_within(first)):
            self.slot(first, self.copy(first))
        hidden: list[str] = []
        kept = [self.ref(leaf, hidden) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        labels, generator = _labels(name, args, kwargs), DeviceGenerator(first.device)
        why = "a gradient of backward(create_graph=True)" if func == READS else next(iter(hidden), "")
        given = [leaf.dtype if isinstance(leaf, Tensor) else None for leaf in leaves]
        op = Op(func, kept, spec, why, generator, generator.get(), scaled, line_of_user(), labels, mutates, given)
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
        calls = [event for event in self.events if isinstance(event, Called)]
        outputs = {node for event in calls for node in event.ends}
        names: set[str] = set()
        inner = False
        for node in functions_of(ends, outputs):
            inner |= any(event.begins < node._sequence_nr() <= event.last for event in calls)
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

    def drop_lost(self) -> None:
        """Drops the functions whose results nobody can use any more: the loop has lost them and all made of them."""
        users: list[Called | Op] = [*(e for e in self.events if isinstance(e, Called)), *self.own.values()]
        held = {*self.slots.values(), *(slot for each in users for slot in each.needs())}
        self.events = needed(self.events, held)

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


def given(args: Any, kwargs: Any, place: int, name: str) -> Any:
    """Returns an argument that is given by its place or by its name; None where it is not given."""
    return args[place] if len(args) > place else kwargs.get(name)


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
    return "inplace" in names and bool(given(args, kwargs, names.index("inplace"), "inplace"))


LOSSES = {
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "kl_div",
}  # fmt: skip


def _labels(name: str, args: Any, kwargs: Any) -> int | None:
    """Returns the number of labels that a loss counts: classes that are not left out, or rows."""
    if name not in LOSSES:
        return None
    target = given(args, kwargs, 1, "target")
    if not isinstance(target, Tensor):
        return None
    if name in ("cross_entropy", "nll_loss") and not target.is_floating_point():
        ignored = kwargs.get("ignore_index", -100)
        return int((target != ignored).sum())
    return target.shape[0] if target.dim() else 1
