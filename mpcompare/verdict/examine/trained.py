"""The update of the pass ``last``: the trained backend's next one, replayed from its own optimizer state.

What is wrong only late in training, such as a decay that stops or moments that lose their digits, shows here. The state
is taken from the backend as it is, so that only the roundings of one update are allowed. Updates are made element by
element, and some elements of a large tensor tell what is made of all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mpcompare.contract import Walk
from mpcompare.dtypes import dtype_name
from mpcompare.tasks.task import Params
from mpcompare.verdict.examine.errors import UNIT_ROUNDOFF, Remembered, clip_errors, largest
from mpcompare.verdict.examine.numerics import spread, spreads
from mpcompare.verdict.examine.seen import Seen, UpdateRule, all_finite, digits, said_norm
from mpcompare.verdict.judge.counts import Count
from mpcompare.verdict.judge.drive import Drive, Step, UpdateError
from mpcompare.verdict.judge.trained import TrainedUpdate


@dataclass(frozen=True)
class BeforeStep:
    """The backend before its step, some elements of each tensor."""

    weights: Params  # by parameter
    optimizer: Mapping[str, Params]  # by kind and parameter, but for the counts
    counts: Params  # the number of updates that the optimizer counts, 0-d tensors by parameter
    scale: float  # the loss scale
    lr: float  # the learning rate of the step
    # updates, steps: the numbers of those that were taken; skipped ones are no updates
    updates: int
    steps: int

    def remembered(self, name: str) -> Remembered:
        """Returns what the optimizer remembers of one parameter."""
        tensors = {kind: {name: kept[name]} for kind, kept in self.optimizer.items() if name in kept}
        return Remembered(tensors, int(self.counts[name]) if name in self.counts else 0)

    def seen(self, grads: Params, clipped: Params, after: Params) -> Seen:
        """Returns the step, some elements of each tensor, from its gradients and the weights after it."""
        count = max((int(count) for count in self.counts.values()), default=self.updates)
        known = Remembered(self.optimizer, count)
        return Seen(self.weights, after, clipped, self.lr, known, grads=grads, scale=self.scale, skipped=False)


def start_of(backend: Any, lr: float, updates: int, steps: int, most: int | None = None) -> BeforeStep:
    """Returns what the next update of a backend starts from, at most so many elements of each tensor; the other
    arguments are the attributes of these names."""
    kinds = backend.state_dict()["optimizer"]
    return BeforeStep(
        weights=spreads(backend.master_params(), most),
        optimizer={kind: spreads(tensors, most) for kind, tensors in kinds.items() if kind != "step"},
        counts={name: count.detach().clone() for name, count in kinds.get("step", {}).items()},
        scale=float(backend.loss_scale()),
        lr=lr,
        updates=updates,
        steps=steps,
    )


def trained_update(
    rule: UpdateRule, walk: Walk, start: BeforeStep, grads: Mapping[str, Tensor], idle: frozenset[str]
) -> TrainedUpdate | None:
    """Takes a step to its end, and returns its update compared with the optimizer's. None where there is none, because
    the step is skipped, and where it cannot be followed, because no gradients are shown or the optimizer remembers
    something else.

    Args:
        rule: has not replayed anything.
        walk: the step, of which the gradients are there.
        grads: before they were clipped, copies where the task clips; of a step in one piece, after.
        idle: the parameters without a gradient, whatever is shown of them.
    """
    backend, task = walk.backend, rule.task
    shown = spreads(grads)
    walk.through("clip")
    whole = grads if walk.in_one_piece or task.clip_norm is None else backend.grads()
    clips = []
    if task.clip_norm is not None and grads:
        before = None if walk.in_one_piece else grads
        clips.append(clip_errors(before, whole, said_norm(backend), task.clip_norm, task.clip_norm_type))
    clipped = spreads({name: g for name, g in whole.items() if name not in idle})
    walk.through("step")
    after, skipped = spreads(backend.master_params()), bool(backend.skipped)
    walk.finish()
    if skipped or not remembers_all(rule, start) or not grads or not all_finite(clipped):
        return None
    kinds = backend.state_dict()["optimizer"]
    drive, moments = replayed(rule, start, start.seen(shown, clipped, after), kinds)
    return TrainedUpdate(replace(drive, clips=clips), moments, _counts(start, kinds.get("step", {}), clipped))


def remembers_all(rule: UpdateRule, start: BeforeStep) -> bool:
    """Returns whether a backend remembers what the optimizer does, so that its update can be followed."""
    known = set(rule.task.optimizer.initial_state(torch.zeros(()))) - {"step"}
    return start.updates == 0 or known <= set(start.optimizer)


def replayed(
    rule: UpdateRule, start: BeforeStep, seen: Seen, kinds: Mapping[str, Params]
) -> tuple[Drive, dict[str, dict[str, float]]]:
    """Returns the update compared with the replay's. And by kind and tensor, of what the optimizer remembers after it,
    the largest error over its bound.

    Args:
        kinds: the optimizer's tensors after the step; empty where only the update is asked for.
    """
    updates: dict[str, UpdateError] = {}
    moments: dict[str, dict[str, float]] = {}
    for name, g in seen.clipped.items():
        updates |= rule.errors(replace(seen, clipped={name: g}, remembered=start.remembered(name)))
        for kind, (value, magnitude) in rule.replay.kept(f"{name} 0").items():
            if name in kinds.get(kind, {}):
                error = (spread(kinds[kind][name]).double() - value).abs_()
                moments.setdefault(kind, {})[name] = largest(error.div_(magnitude.mul(UNIT_ROUNDOFF)))
    mistakes = rule.mistakes([seen.update(start.updates, start.steps)], [updates])
    lost = not all(excess <= 1 for of_kind in moments.values() for excess in of_kind.values())
    step = Step(True, False, False, True, start.scale, start.scale)
    remembered = {kind: spreads(tensors) for kind, tensors in kinds.items()} if mistakes is not None or lost else {}
    drive = Drive([step], [updates], known_mistakes=mistakes or {}, digits=digits(remembered))
    return drive, moments


def _counts(start: BeforeStep, after: Mapping[str, Tensor], moved: Params) -> dict[str, Count]:
    """Returns the number of updates that the optimizer counts of each parameter with a gradient, and the right one: one
    more than before, where the most that it counted of any are all that were taken."""
    missed = start.updates - max((int(count) for count in start.counts.values()), default=0)
    return {
        name: Count(float(count), int(start.counts.get(name, torch.zeros(()))) + missed + 1, dtype_name(count.dtype))
        for name, count in after.items()
        if name in moved
    }
