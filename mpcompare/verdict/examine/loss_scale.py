"""The loss scale that a backend is held to: as it was asked for, except for what the backend promises."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mpcompare.loss_scale import DynamicLossScale, LossScale, NoLossScale, load_state
from mpcompare.promises import Promises
from mpcompare.verdict.judge.loss_scale import WrongScale

StepRows = Sequence[Mapping[str, Any]]  # the rows of ``steps.csv``, a training step each


def promised_scaling(scaling: LossScale, promises: Promises) -> LossScale:
    """Returns a copy of the loss scale asked for, with the settings that a backend promises to be its own."""
    if isinstance(scaling, DynamicLossScale) and promises.loss_scale:
        return replace(scaling, **promises.loss_scale)  # type: ignore[arg-type]
    return copy.deepcopy(scaling)


class ExpectedScale:
    """The loss scale that a backend should have, and the steps that it should skip.

    Attributes:
        scaling: the scale that the backend promises, after the steps that were seen.
        asked: the scale that was asked for.
        skips: whether a step is skipped if its gradients are not finite.
    """

    def __init__(self, scaling: LossScale, promises: Promises) -> None:
        self.asked, self.scaling = copy.deepcopy(scaling), promised_scaling(scaling, promises)
        self.skips = promises.skips_without_scale or not isinstance(scaling, NoLossScale)

    def load(self, state: Mapping[str, float]) -> None:
        """Loads the state of a loss scale."""
        for scaling in (self.scaling, self.asked):
            load_state(scaling, state)

    def step(self, finite: bool) -> tuple[bool, float, float | None]:
        """Returns the arguments of :meth:`Seen.step` other than ``finite``, and goes on to the next step."""
        scale, asked = self.scaling.scale, self.asked.scale
        for scaling in (self.scaling, self.asked):
            scaling.update(not finite)
        return self.skips, scale, None if asked == scale else asked


def first_wrong_scale(scaling: LossScale, rows: StepRows) -> WrongScale | None:
    """Returns the first training step whose loss scale does not follow from the steps that were skipped before.
    ``scaling`` is the loss scale before the first step."""
    scaling = copy.deepcopy(scaling)
    for row in rows:
        if row["loss_scale"] != scaling.scale:
            return WrongScale(row["loss_scale"], scaling.scale, row["step"])
        scaling.update(row["skipped"])
    return None
