"""The update of the pass ``last``: the trained backend's next update, replayed from its own optimizer state.

Mistakes that come late in training, such as a decay that stops or moments that lose their digits, show here. The state
is taken from the backend as it is, so that only the roundings of one update are allowed. Updates are made element by
element, so some elements of a large tensor stand for all.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mpcompare.contract import Batches, Walk
from mpcompare.dtypes import dtype_name
from mpcompare.phases import WHOLE_STEP
from mpcompare.tasks.task import Params
from mpcompare.verdict.examine.errors import UNIT_ROUNDOFF, clip_errors, largest
from mpcompare.verdict.examine.numerics import norm_of, spread, spreads
from mpcompare.verdict.examine.seen import Remembered, Seen, all_finite, said_norm
from mpcompare.verdict.examine.update_rule import UpdateRule, digits
from mpcompare.verdict.judge.counts import Count
from mpcompare.verdict.judge.drive import Drive, Step, UpdateError
from mpcompare.verdict.judge.trained import TrainedUpdate


class KeptStep(Walk):
    """A step that keeps everything that its update is made of, some elements of each tensor. It is the same step, bit
    for bit.

    Attributes:
        before: the weights before the step.
        optimizer: by kind and parameter what the optimizer remembers before the step, without the counts.
        counts: the number of updates that the optimizer counts before the step, 0-d tensors by parameter.
        scale, lr: the loss scale and the learning rate of the step.
        updates, steps: the numbers of updates and steps that were taken before; skipped steps are no updates.
        grads: the gradients before they were clipped, or after it in a step in one piece.
        clipped, clipped_norm: the gradients that the optimizer is given, and the norm of all of them.
        after: the weights after the step; empty until it is taken, and where it is skipped.
    """

    def __init__(
        self,
        backend: Any,
        batches: Batches,
        lr: float | Tensor,
        updates: int,
        steps: int,
        most: int | None = None,
        at_the_end: Callable[[], None] = lambda: None,
    ) -> None:
        """``most`` is the number of elements of each tensor, at most. All else is an attribute, or a walk's."""
        super().__init__(backend, batches, lr, at_the_end)
        kinds = backend.state_dict()["optimizer"]
        self.lr, self.updates, self.steps, self.most = float(lr), updates, steps, most
        self.scale = float(backend.loss_scale())
        self.before = spreads(backend.master_params(), most)
        self.optimizer = {kind: spreads(tensors, most) for kind, tensors in kinds.items() if kind != "step"}
        self.counts: Params = {name: count.detach().clone() for name, count in kinds.get("step", {}).items()}
        self.grads: Params = {}
        self.clipped: Params = {}
        self.clipped_norm = math.nan
        self.after: Params = {}

    def __iter__(self) -> Iterator[str]:
        for phase in super().__iter__():
            if phase in ("unscale", WHOLE_STEP):
                self.grads = spreads(self.backend.grads(), self.most)
            if phase in ("clip", WHOLE_STEP):
                self.clipped = spreads(self.backend.grads(), self.most)
                self.clipped_norm = norm_of(self.backend.grads())
            if phase in ("step", WHOLE_STEP) and not bool(self.backend.skipped):
                self.after = spreads(self.backend.master_params(), self.most)
            yield phase

    def seen(self, left_out: Collection[str]) -> Seen:
        """Returns the step without the gradients of some parameters."""
        clipped = {name: g for name, g in self.clipped.items() if name not in left_out}
        count = max((int(count) for count in self.counts.values()), default=self.updates)
        known = Remembered(self.optimizer, count)
        return Seen(
            self.before, self.after, clipped, self.lr, known, grads=self.grads, scale=self.scale, number=self.updates,
            steps=self.steps, clipped_norm=self.clipped_norm,
        )  # fmt: skip


def trained_update(
    rule: UpdateRule, step: KeptStep, grads: Mapping[str, Tensor], idle: frozenset[str]
) -> TrainedUpdate | None:
    """Takes a step to its end. Returns its update compared with the optimizer's; None where the step is skipped,
    and where its update cannot be followed: no gradients are shown, or the optimizer remembers something else.

    Args:
        rule: has not replayed anything.
        step: the step, taken as far as its gradients.
        grads: the gradients before they were clipped, copies where the task clips; after it in a step in one piece.
        idle: the parameters without a gradient, whatever the backend shows of them.
    """
    backend, task, clips = step.backend, rule.task, []
    step.through("clip")
    if task.clip_norm is not None and grads:
        before, clipped = (None, grads) if step.in_one_piece else (grads, backend.grads())
        clips.append(clip_errors(before, clipped, said_norm(backend), task.clip_norm, task.clip_norm_type))
    step.finish()
    seen = step.seen(idle)
    if not can_be_followed(rule, step, seen):
        return None
    kinds = backend.state_dict()["optimizer"]
    drive, moments = replayed(rule, step, seen, kinds)
    return TrainedUpdate(replace(drive, clips=clips), moments, _counts(step, kinds.get("step", {}), seen.clipped))


def can_be_followed(rule: UpdateRule, step: KeptStep, seen: Seen) -> bool:
    """Returns whether a step was an update from gradients that are shown and finite, and its backend remembers what the
    optimizer does."""
    known = set(rule.task.optimizer.initial_state(torch.zeros(()))) - {"step"}
    remembers = step.updates == 0 or known <= set(step.optimizer)
    return remembers and bool(step.after) and bool(step.grads) and all_finite(seen.clipped)


def replayed(
    rule: UpdateRule, step: KeptStep, seen: Seen, kinds: Mapping[str, Params]
) -> tuple[Drive, dict[str, dict[str, float]]]:
    """Returns the update compared with the replay's. And returns, by kind and tensor, the largest error over its bound
    of what the optimizer remembers after it: ``kinds``, empty where only the update is asked for."""
    updates: dict[str, UpdateError] = {}
    moments: dict[str, dict[str, float]] = {}
    for name, g in seen.clipped.items():
        tensors = {kind: {name: kept[name]} for kind, kept in step.optimizer.items() if name in kept}
        known = Remembered(tensors, int(step.counts[name]) if name in step.counts else 0)
        updates |= rule.errors(replace(seen, clipped={name: g}, remembered=known))
        for kind, (value, magnitude) in rule.replay.kept(name).items():
            if name in kinds.get(kind, {}):
                error = (spread(kinds[kind][name]).double() - value).abs_()
                moments.setdefault(kind, {})[name] = largest(error.div_(magnitude.mul(UNIT_ROUNDOFF)))
    mistakes = rule.mistakes([seen.in_part()], [updates])
    lost = not all(excess <= 1 for of_kind in moments.values() for excess in of_kind.values())
    remembered = {kind: spreads(tensors) for kind, tensors in kinds.items()} if mistakes is not None or lost else {}
    taken = Step(True, False, False, True, step.scale, step.scale)
    drive = Drive([taken], [updates], known_mistakes=mistakes or {}, digits=digits(remembered))
    return drive, moments


def _counts(step: KeptStep, after: Mapping[str, Tensor], moved: Mapping[str, Tensor]) -> dict[str, Count]:
    """Returns for each parameter with a gradient the number of updates that the optimizer counts, and the right number.
    The right number is one more than before, plus the updates that none had counted. Where the parameters take turns,
    as those of two networks may, nobody knows which had a gradient in which update."""
    before = {name: int(count) for name, count in step.counts.items()}
    turns = len(set(before.values())) > 1 or not before.keys() <= moved.keys()
    missed = 0 if turns else step.updates - max(before.values(), default=0)
    return {
        name: Count(float(count), before.get(name, 0) + missed + 1, dtype_name(count.dtype))
        for name, count in after.items()
        if name in moved
    }
