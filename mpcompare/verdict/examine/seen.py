"""A step as it was seen, whoever made it: a backend that is driven, or hooks on somebody's own loop."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.errors import FROM_THE_START, Change, Remembered, clip_errors
from mpcompare.verdict.examine.updates import Update, some_of
from mpcompare.verdict.judge.drive import Clip, Step


@dataclass(frozen=True)
class Seen:
    """One step as it was seen.

    Attributes:
        lr: its learning rate.
        loss: as its maker says.
        grads: before they were clipped; of a step in one piece, after; empty where none are shown.
        clipped: after they were clipped.
        before, after: the weights; those after it may be the maker's own, which its next step changes.
        scale: the loss scale before the step, as its maker says.
        skipped: as its maker says.
        moved_early: whether weights changed before the gradients of all micro-batches were there.
        in_one_piece: whether the step had no phases.
        draws_alike: whether the network drew the random numbers of the oracle's.
        norm: that of the gradients, as the maker says; NaN where it says none.
        buffers: before the step.
    """

    lr: float
    loss: float
    grads: Mapping[str, Tensor]
    clipped: Mapping[str, Tensor]
    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]
    scale: float
    skipped: bool
    moved_early: bool = False
    in_one_piece: bool = False
    draws_alike: bool = True
    norm: float = math.nan
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

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

    def change(self, remembered: Remembered) -> Change:
        """Returns the update as the optimizer sees it."""
        return Change(self.before, self.after, self.clipped, self.lr, remembered)

    def update(self, number: int, steps: int, remembered: Remembered = FROM_THE_START) -> Update:
        """Returns some elements of the update.

        Args:
            number, steps: how many updates, and steps, were taken before.
        """
        return Update(
            before=some_of(self.before),
            after=some_of(self.after),
            grads=some_of(self.grads),
            clipped=some_of(self.clipped),
            lr=self.lr,
            norm=numerics.total_norm(self.clipped, 2.0) if self.clipped else math.nan,
            number=number,
            steps=steps,
            remembered=replace(remembered, tensors={kind: some_of(t) for kind, t in remembered.tensors.items()}),
            scale=self.scale,
        )

    def clip(self, clip_norm: float, norm_type: float) -> Clip:
        """Returns what clipping made of the gradients."""
        shown = None if self.in_one_piece else self.grads
        return clip_errors(shown, self.clipped, self.norm, clip_norm, norm_type)


def all_finite(tensors: Mapping[str, Tensor]) -> bool:
    """Returns whether all numbers of all tensors are finite: the smallest and the largest, which are NaN if any is."""
    each = [numerics.numbers(t) for t in tensors.values() if t.numel()]
    return all(bool(torch.stack(t.aminmax()).isfinite().all()) for t in each)


def moved(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> bool:
    """Returns whether any bit of any tensor changed."""
    return any(not numerics.same_bits(before[name], after[name]) for name in before)
