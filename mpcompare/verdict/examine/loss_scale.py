"""The loss scale of every training step, compared with the one that its policy gives."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from mpcompare.loss_scale import LossScale
from mpcompare.verdict.judge.loss_scale import WrongScale


def first_wrong_scale(scaling: LossScale, rows: Sequence[Mapping[str, Any]]) -> WrongScale | None:
    """Returns the first training step whose loss scale does not follow from the steps that were skipped before.

    Args:
        scaling: the loss scale before the first step.
        rows: those of ``steps.csv``.
    """
    scaling = copy.deepcopy(scaling)
    for row in rows:
        if row["loss_scale"] != scaling.scale:
            return WrongScale(row["loss_scale"], scaling.scale, row["step"])
        scaling.update(row["skipped"])
    return None
