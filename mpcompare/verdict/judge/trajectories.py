"""The losses of runs, step by step: how far apart they are, and up to which step runs can be compared."""

import math
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from mpcompare.precision import PRECISIONS
from mpcompare.verdict.judge.check import Examined
from mpcompare.verdict.judge.limits import t_quantile

if TYPE_CHECKING:  # pandas takes long to import, and an examination needs none
    import pandas as pd


def loss_apart(a: Any, b: Any) -> "pd.Series":
    """Returns ``|loss of a - loss of b|`` by the steps that both have: a run that resumed lacks the first ones. Both
    have the rows of ``steps.csv`` as ``steps``."""
    first, second = (each.steps.set_index("step")["loss"].astype(float) for each in (a, b))
    return first.sub(second).abs().loc[first.index.intersection(second.index)]


def loss_noise(reference: Examined) -> np.ndarray:
    """Returns step by step the largest difference between the losses of any two of ``reference`` and its noise runs."""
    losses = [reference.steps["loss"].to_numpy(), *(np.array(again.losses) for again in reference.findings.noise)]
    return np.max([np.abs(a - b) for a, b in combinations(losses, 2)], axis=0)


def noise_factor(reference: Examined) -> float:
    """Returns how many standard deviations of a sample one more correct run may be away from ``reference``.

    The reference and its noise runs are the sample, a small one. Student's t has one degree of freedom for each noise
    run; the root of 2, because both runs vary.
    """
    return math.sqrt(2) * t_quantile(len(reference.findings.noise))


def draws_alike(run: Examined, reference: Examined) -> bool:
    """Returns whether both draw in training the random numbers of a plain call of the network, such as the masks of
    dropout; True, too, if the network draws nothing."""
    return all(each.findings.masks is None or each.findings.masks.training for each in (run, reference))


def common_steps(reference: Examined, run: Examined | None = None) -> int:
    """Returns the number of steps in which runs can be compared, before their trajectories part.

    Differences between correct runs grow step by step. As long as they are small they grow alike, up to a factor, and
    the noise says how large they may be. Once they are no longer small, every run goes its own way. The border lies at
    half of the digits: noise beyond the root of the unit roundoff, relative to the loss. A step that one run skips and
    another takes parts them too. Runs that resumed from different points have no step in common, nor have runs with
    other masks of dropout. If updates have no bound, any step may part two runs, and a sample of three may hold no such
    step. The skipped steps of the reference, of its noise runs and of the ``run`` count.
    """
    if run is not None and (run.start != reference.start or not draws_alike(run, reference)):
        return 0
    if not reference.findings.recipe.bounded:
        return 0
    if not reference.findings.noise:
        return len(reference.steps)
    skips = [r.steps["skipped"].to_numpy(dtype=bool) for r in (reference, run) if r is not None]
    skips += [np.array(again.skipped, dtype=bool) for again in reference.findings.noise]
    steps = min(map(len, skips))
    skips = [skip[:steps] for skip in skips]
    loss = np.maximum.accumulate(np.abs(reference.steps["loss"].to_numpy(dtype=float)[:steps]))
    parted = ~(loss_noise(reference)[:steps] <= math.sqrt(reference.unit_roundoff) * loss)
    parted |= np.any([skip != skips[0] for skip in skips], axis=0)
    return int(np.argmax(parted)) if parted.any() else steps


def jump(reference: Examined) -> float:
    """Returns how far, relatively, a unit that turns at its kink may move the losses of a run in fp32, where a few
    runs may hold no such unit; 0 in a precision whose noise runs hold such units."""
    u = reference.unit_roundoff
    return math.sqrt(u) if u == PRECISIONS["fp32"].unit_roundoff else 0.0
