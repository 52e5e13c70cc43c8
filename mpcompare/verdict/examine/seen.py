"""A step as it was seen, whoever made it: a backend that is driven, or hooks on somebody's own loop.

Its update is compared with the optimizer's rule, as a backend promises to follow it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mpcompare.clipping import factor_of_norm
from mpcompare.contract import Batches
from mpcompare.dtypes import torch_dtype
from mpcompare.precision import FORMATS, Precision
from mpcompare.promises import Promises
from mpcompare.tasks.optimizers import IN_FP32, Coarse, Optimizer
from mpcompare.tasks.task import Params, Task
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.errors import Change, clip_errors, update_errors
from mpcompare.verdict.examine.known_mistakes import known_mistakes
from mpcompare.verdict.examine.loss_scale import promised_task
from mpcompare.verdict.examine.updates import Update, some_of
from mpcompare.verdict.judge.drive import Clip, KnownMistake, Step, UpdateError


@dataclass(frozen=True, kw_only=True)
class Seen(Change):
    """One step as it was seen. The weights after it may be the maker's own, which its next step changes."""

    loss: float = math.nan  # as its maker says; NaN where nobody asks
    grads: Mapping[str, Tensor]  # before they were clipped; of a step in one piece, after; empty where none are shown
    scale: float  # the loss scale before the step, as its maker says
    skipped: bool  # as its maker says
    moved_early: bool = False  # whether weights changed before the gradients of all micro-batches were there
    in_one_piece: bool = False  # whether the step had no phases
    draws_alike: bool = True  # whether the network drew the random numbers of the oracle's
    norm: float = math.nan  # the norm of the gradients, as the maker says; NaN where it says none
    # buffers, buffers_after: before the step and after it
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    buffers_after: Mapping[str, Tensor] = field(default_factory=dict)
    batch: Batches = field(default_factory=list)  # as its micro-batches

    @property
    def moved(self) -> bool:
        """Whether a weight changed."""
        return moved(self.before, self.after)

    def step(self, finite: bool, skips: bool, should_scale: float, asked_scale: float | None = None) -> Step:
        """Returns the loss scale and the weights in the step.

        Args:
            finite: whether its gradients were.
            skips: whether the policy of the loss scale skips a step whose gradients are not.
            should_scale, asked_scale: those of :class:`Step`.
        """
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
        )

    def update(self, number: int, steps: int) -> Update:
        """Returns some elements of the update.

        Args:
            number, steps: how many updates, and steps, were taken before.
        """
        tensors = {kind: some_of(of_kind) for kind, of_kind in self.remembered.tensors.items()}
        return Update(
            before=some_of(self.before),
            after=some_of(self.after),
            grads=some_of(self.grads),
            clipped=some_of(self.clipped),
            lr=self.lr,
            norm=numerics.total_norm(self.clipped, 2.0) if self.clipped else math.nan,
            number=number,
            steps=steps,
            remembered=replace(self.remembered, tensors=tensors),
            scale=self.scale,
        )

    def clip(self, clip_norm: float, norm_type: float) -> Clip:
        """Returns what clipping made of the gradients."""
        shown = None if self.in_one_piece else self.grads
        return clip_errors(shown, self.clipped, self.norm, clip_norm, norm_type)


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


def own_factor(norm: float, task: Task) -> float:
    """Returns the factor by which a backend multiplied its gradients when it clipped them, from the norm that it says
    they had."""
    return factor_of_norm(norm, task.clip_norm) if task.clip_norm is not None and norm >= 0 else 1.0


class UpdateRule:
    """The updates that follow from gradients.

    Attributes:
        task: as the backend promises to clip it.
        replay: the optimizer in float64, in the arithmetic that the backend promises.
    """

    def __init__(self, task: Task, precision: Precision, promises: Promises) -> None:
        self.promises, self.task = promises, promised_task(task, promises)
        coarse = Coarse(promises.coarse_weights, promises.coarse_moments) if promises.coarse else IN_FP32
        self.replay = task.optimizer.replay(coarse)
        self.compute = torch_dtype(precision.storage)
        self.short = self.compute if promises.weights == "fp32" else torch_dtype(FORMATS[promises.weights])

    def errors(self, change: Change) -> dict[str, UpdateError]:
        """Returns how far the next update is from the rule's."""
        return update_errors(self.replay, change, self.short, self.promises.coarse_weights)

    def mistakes(
        self, updates: Sequence[Update], errors: Sequence[Mapping[str, UpdateError]]
    ) -> dict[str, KnownMistake] | None:
        """Returns the known mistakes that updates with these errors are compared with; None where all are right. Bounds
        of coarse weights are so wide that mistakes fit into them."""
        if all(e.excess <= 1 for update in errors for e in update.values()):
            return None
        return {} if self.promises.coarse else known_mistakes(self.task, updates, self.compute)


def digits(state: Mapping[str, Params]) -> dict[str, float]:
    """Returns, of each kind of what the optimizer remembers, the share of nonzero numbers that have no more digits than
    fp16 or bf16."""
    shares = {}
    for kind, tensors in _moments(state).items():
        values = torch.cat([t.detach().flatten() for t in tensors.values() if t.dim()] or [torch.zeros(0)])
        if len(values := values[values != 0]):
            shares[kind] = numerics.short_share(values)
    return shares


def early(state: Mapping[str, Params], optimizer: Optimizer) -> list[str]:
    """Returns the kinds of the optimizer's tensors that hold another number than they should before the first update:
    0, but for a few optimizers."""
    first = optimizer.initial_state(torch.zeros(()))
    at_first = {kind: float(first[kind]) if kind in first else 0.0 for kind in state}
    return [
        kind
        for kind, tensors in _moments(state).items()
        if any(bool((t != at_first[kind]).any()) for t in tensors.values())
    ]


def _moments(state: Mapping[str, Params]) -> dict[str, Params]:
    """Returns everything that the optimizer remembers, but for the count of updates, which is a whole number."""
    return {kind: tensors for kind, tensors in state.items() if kind != "step"}
