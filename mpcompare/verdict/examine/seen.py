"""A step as it was seen, whoever made it: a backend that is driven, or hooks on somebody's own loop.

An update may be the right one for the gradients that were seen, or another one, such as a known mistake makes.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpcompare.contract import Batches
from mpcompare.tasks.optimizers import UpdateReplay
from mpcompare.tasks.task import Params
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.judge.drive import Step

ELEMENTS = 4096  # of a large tensor, evenly spread: every update works element by element


@dataclass(frozen=True)
class Remembered:
    """Everything that an optimizer remembers in a state that was loaded."""

    # by torch's name of the kind and by parameter, without the count of updates
    tensors: Mapping[str, Params] = field(default_factory=dict)
    updates: int = 0  # the count of updates
    at_once: bool = False  # whether the backend was given this count, and did not count to it

    def of(self, name: str) -> dict[str, Tensor]:
        """Returns the tensors of one parameter, by kind."""
        return {kind: tensors[name] for kind, tensors in self.tensors.items() if name in tensors}


FROM_THE_START = Remembered()


@dataclass(frozen=True)
class Seen:
    """One step as it was seen. The weights after it may be the maker's own, which its next step changes."""

    # before, after: the weights
    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]
    clipped: Mapping[str, Tensor]  # the gradients that the optimizer is given
    lr: float  # the learning rate of the step
    remembered: Remembered = FROM_THE_START  # the state that was loaded before it
    _: KW_ONLY
    loss: float = math.nan  # the loss, as the step's maker says; NaN where nobody asks
    # the gradients before they were clipped, or after it in a step in one piece; empty where none are shown
    grads: Mapping[str, Tensor] = field(default_factory=dict)
    scale: float = 1.0  # the loss scale before the step, as its maker says
    skipped: bool = False  # whether the step was skipped, as its maker says
    # number, steps: how many updates, and how many steps, were taken before this step
    number: int = 0
    steps: int = 0
    moved_early: bool = False  # whether weights changed before the gradients of all micro-batches were there
    in_one_piece: bool = False  # whether the step had no phases
    draws_alike: bool = True  # whether the network drew the oracle's random numbers
    norm: float = math.nan  # the norm of the gradients, as the maker says; NaN where it says none
    clipped_norm: float = math.nan  # the 2-norm of all of ``clipped``, of which a part may be kept; NaN: none shown
    # buffers, buffers_after: before the step and after it
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    buffers_after: Mapping[str, Tensor] = field(default_factory=dict)
    batch: Batches = field(default_factory=list)  # the batch as its micro-batches

    @property
    def moved(self) -> bool:
        """Whether a weight changed."""
        return moved(self.before, self.after)

    def step(self, finite: bool, skips: bool, should_scale: float, asked_scale: float | None = None) -> Step:
        """Returns the loss scale and the weights in the step. Its gradients were ``finite``, or the policy of the loss
        scale ``skips`` such a step. The scales are as in :class:`Step`."""
        return Step(
            finite=finite,
            skipped=self.skipped,
            should_skip=skips and not finite,
            moved=self.moved,
            moved_early=self.moved_early,
            finite_after_clip=finite if self.clipped is self.grads else all_finite(self.clipped),
            loss_scale=self.scale,
            should_scale=should_scale,
            asked_scale=asked_scale,
            at_rest=self.lr == 0,
        )

    def in_part(self, most: int = ELEMENTS) -> "Seen":
        """Returns the update of the step: at most so many elements of each tensor, and no buffers."""

        def some_of(tensors: Mapping[str, Tensor]) -> Params:
            return numerics.spreads(tensors, most)

        remembered = {kind: some_of(of_kind) for kind, of_kind in self.remembered.tensors.items()}
        return replace(
            self,
            buffers={},
            buffers_after={},
            before=some_of(self.before),
            after=some_of(self.after),
            grads=some_of(self.grads),
            clipped=some_of(self.clipped),
            remembered=replace(self.remembered, tensors=remembered),
        )


def all_finite(tensors: Mapping[str, Tensor]) -> bool:
    """Returns whether all numbers of all tensors are finite: the smallest and the largest, which are NaN if any is."""
    each = (numerics.numbers(t) for t in tensors.values() if t.numel())
    return all(bool(torch.stack(t.aminmax()).isfinite().all()) for t in each)


def moved(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> bool:
    """Returns whether any bit of any tensor changed."""
    return any(not numerics.same_bits(before[name], after[name]) for name in before)


def said_norm(backend: Any) -> float:
    """Returns the norm that a backend says its gradients had; NaN where it says none."""
    return math.nan if backend.grad_norm is None else float(backend.grad_norm)


Mistake = Callable[[str, Seen], tuple[Tensor, Tensor]]  # change and magnitude, as ``Replay.step`` returns them


class Known(NamedTuple):
    """A known mistake: its cause, the words for its updates, which go on after "made", and a maker of these updates."""

    cause: str
    made: str
    updates: Mistake


def by(
    replay: UpdateReplay,
    rate: Callable[[Seen], float] | None = None,
    unclipped: bool = False,
    grad_of: Callable[[Tensor, Tensor, Seen], Tensor] | None = None,
    weight_dtype: torch.dtype | None = None,
) -> Mistake:
    """Returns the updates of a replay. It may see another rate, other gradients, or other weights than the step had:
    ``grad_of`` makes a gradient from the right gradient, the weight, and the update."""

    def mistake(name: str, update: Seen) -> tuple[Tensor, Tensor]:
        g, w = (update.grads if unclipped else update.clipped)[name].double(), update.before[name]
        w = (w.to(weight_dtype) if weight_dtype else w).double()
        if grad_of:
            g = grad_of(g, w, update)
        kept = update.remembered.of(name)
        if kept or update.remembered.updates:
            loaded = {kind: tensor.double() for kind, tensor in kept.items()}
            replay.remember(name, loaded, update.remembered.updates, update.remembered.at_once)
        return replay.step(name, g, w, rate(update) if rate else update.lr)

    return mistake
