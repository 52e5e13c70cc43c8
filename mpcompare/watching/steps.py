"""The parts of a loop that was seen: sums of gradients, and the steps that optimizers took with them."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from mpcompare.tasks.task import Params
from mpcompare.verdict.examine.forced.record import Record
from mpcompare.verdict.examine.numerics import same_bits
from mpcompare.watching.events import Called, Event, Op, Root

PRODUCTS = ("mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__")
SUMS = ("add", "add_", "sub", "sub_", "__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__")
WEIGHS = (
    *PRODUCTS, "div", "div_", "__truediv__", "__itruediv__", "neg", "__neg__", "mean", "sum", "float", "to", "squeeze",
)  # fmt: skip


@dataclass(frozen=True)
class LeftGradient:
    """The gradient of a parameter as backward left it."""

    part: Tensor  # all of it, or some elements of a large one: see ``in_part``
    some: Tensor  # the elements that are looked at of each tensor of a step: see ``spread``
    norm: float  # the norm of the whole gradient; inf or NaN where it holds any


@dataclass(eq=False)
class Sum:
    """The gradients of some micro-batches, from where there were none until an optimizer used them."""

    record: Record  # the record of the calls of the layers
    tape: list[Event]  # everything between the network's output and ``backward``
    grads: dict[str, LeftGradient]  # before anything changed them
    weights: Params  # the weights in the first call of the network
    first: Called | None  # the first call; None where none was seen
    buffers_after: Params  # after the last call that is a part of it
    # the parameters whose gradients hold the gradients of the update before, too, as the step left them
    stale: list[str]
    dropped: int  # the number of backward passes whose gradients were cleared before an update used them
    given_up: int  # the number of such passes whose gradients held inf or NaN, and so were cleared
    hidden: str  # why the layers cannot be replayed; empty where they can
    training: bool  # whether the network was in training mode
    owned: set[str]  # the names of the parameters that the optimizers have
    hooked: set[str]  # the names of the parameters whose gradients hooks of the loop may change
    autocast: str  # the dtype of autocast in its layers; empty where there was none
    tf32: bool  # whether products of fp32 numbers may have been in TF32
    # the norm to which the gradients were clipped between two backward passes, and the line; empty where they were not
    # clipped there, or where the two passes are of different losses
    clipped: str = ""

    @property
    def roots(self) -> list[Root]:
        """The calls of ``backward``."""
        return [event for event in self.tape if isinstance(event, Root)]

    @property
    def calls(self) -> list[Called]:
        """The calls of the network, or of its parts."""
        return [event for event in self.tape if isinstance(event, Called)]

    def record_of_still(self) -> Record:
        """Returns the record without the layers whose weights move between two calls of the network."""
        moving = {name.rpartition(".")[0] for called in self.calls for name in moved(self.weights, called.weights)}
        return replace(self.record, calls={n: c for n, c in self.record.calls.items() if n not in moving})

    @property
    def ops(self) -> list[Op]:
        """The functions of torch that the loop called."""
        return [event for event in self.tape if isinstance(event, Op)]

    @property
    def scaled(self) -> bool:
        """Whether a scaler multiplied the loss."""
        return any(op.scaled for op in self.ops)

    def factors(self) -> Iterator[tuple[float, Op]]:
        """Yields the numbers by which functions on the tape multiply, and which no function on the tape made."""
        for op in self.ops:
            for leaf in op.leaves if op.name in PRODUCTS else ():
                if isinstance(leaf, (int, float)) or (isinstance(leaf, Tensor) and leaf.numel() == 1):
                    yield float(leaf), op

    @property
    def has_weights(self) -> bool:
        """Whether losses are weighted with several numbers, such as the gradients of another loss."""
        given = any(g is not None for root in self.roots for g in root.gradients)
        factors = (leaf for op in self.ops if op.name in PRODUCTS for leaf in op.leaves)
        return given or any(isinstance(leaf, Tensor) and leaf.numel() > 1 for leaf in factors)

    @property
    def scales(self) -> list[float]:
        """The loss scales by which a scaler multiplied the losses."""
        leaves = [leaf for op in self.ops if op.scaled and op.name == "mul" for leaf in op.leaves]
        return [float(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel() == 1]


def moved(earlier: Params, later: Params) -> list[str]:
    """Returns the names of the weights that differ in some bit."""
    both = [(name, earlier[name], w) for name, w in later.items() if name in earlier]
    return [name for name, a, b in both if a is not b and not same_bits(a, b)]


@dataclass(frozen=True)
class CalledClip:
    """A call of torch's function that clips gradients to a norm."""

    asked: tuple[float, float]  # the norm, and its type
    line: str  # the line of the user's code
    # by parameter the norms of the gradients before; empty where one optimizer has all of them
    norms: Mapping[str, float]
    scaled: frozenset[str]  # those of them that nobody had divided since backward: they hold the loss scale

    def norm_of(self, names: Iterable[str], scale: float) -> float:
        """Returns the norm of some of these gradients together, without the loss scale."""
        own = ((n, self.norms[n]) for n in names if n in self.norms)
        return math.hypot(*(norm / scale if n in self.scaled else norm for n, norm in own))


@dataclass
class Taken:
    """One step of an optimizer, some elements of each tensor."""

    optimizer: str  # the name of the optimizer
    sum: Sum | None  # the sum of its gradients; None where there was no backward since the last step
    settings: Mapping[str, dict[str, Any]]  # by parameter the settings of its group
    given: Params = field(default_factory=dict)  # the gradients as the optimizer got them
    finite: bool = True  # whether the gradients that the optimizer got were finite
    norm: float = math.nan  # the norm of all these gradients if torch's function was asked to clip them; else NaN
    called: Params = field(default_factory=dict)  # the weights in forward
    before: Params = field(default_factory=dict)  # the weights before the step
    after: Params = field(default_factory=dict)  # the weights after the step
    state: dict[str, dict[str, Any]] = field(default_factory=dict)  # by parameter what the optimizer remembers
    state_after: dict[str, dict[str, Any]] = field(default_factory=dict)  # the same after the step
    scale: float = 1.0  # the loss scale; 1 without a scaler
    by_scaler: bool = False  # whether a scaler called the step
    scaled: bool = False  # whether the loss was multiplied by the scale
    scales_another: bool = False  # whether the scaler multiplied some loss since its last ``update``
    unscaled: bool = False  # whether the gradients were divided by the scale
    skipped: bool = False  # whether the scaler left the step out
    order: list[tuple[str, str]] = field(default_factory=list)  # the parts of the step: what was done, and the line
    clip: CalledClip | None = None  # the call that clipped its gradients
    dtypes: dict[str, str] = field(default_factory=dict)  # the dtypes of the parameters
    # the parameters whose gradient is sparse, and has a row in several parts, which are added one by one
    row_by_row: frozenset[str] = frozenset()
    closures: int = 0  # how often the optimizer called its closure again
    drew: bool = False  # whether the optimizer drew random numbers of torch
    in_backward: bool = False  # whether a hook of backward took the step, when the gradient of a parameter was there

    def in_forward(self) -> Params:
        """Returns the weights before the step in the dtypes of forward. Masters have more digits."""
        return {n: w.to(self.called[n].dtype) if n in self.called else w for n, w in self.before.items()}

    @property
    def raw(self) -> Params:
        """The gradients as backward left them, some elements of each."""
        return {n: g.some for n, g in self._grads()}

    @property
    def norms(self) -> dict[str, float]:
        """By parameter the norm of its whole raw gradient."""
        return {n: g.norm for n, g in self._grads()}

    @property
    def overflowed(self) -> list[str]:
        """The parameters of the optimizer whose gradients held inf or NaN as backward left them."""
        return [n for n, norm in self.norms.items() if n in self.given and not math.isfinite(norm)]

    @property
    def asked(self) -> tuple[float, float] | None:
        """The norm, and its type, to which ``clip_grad_norm_`` was asked to clip its gradients; None: nobody asked."""
        return self.clip.asked if self.clip is not None else None

    @property
    def losses(self) -> list[float]:
        """The losses of the backward passes that its gradients come from."""
        return [root.loss for root in self.sum.roots] if self.sum else []

    def _grads(self) -> list[tuple[str, LeftGradient]]:
        return [(n, g) for n, g in self.sum.grads.items() if n in self.settings] if self.sum else []


def in_turn(taken: Sequence[Taken]) -> Iterator[tuple[int, Taken, Taken]]:
    """Yields the number of each step, the step before it of the same optimizer, and the step itself."""
    last: dict[str, Taken] = {}
    for number, step in enumerate(taken, start=1):
        if step.optimizer in last:
            yield number, last[step.optimizer], step
        last[step.optimizer] = step
