"""Small multiples: of more runs than colours and dashes tell apart, each has a panel of its own."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import SubFigure

from mpcompare.report.comparison import Entry
from mpcompare.verdict.judge.trajectories import steps_of_both

MANY = 20  # runs that one panel can show
IN_ROW, INCHES = 5, 1.25  # panels in a row, and the height of a row
LONGEST = 26  # characters of a panel's title


def rows_of(runs: int) -> int:
    """Returns the rows of panels that so many runs need."""
    return math.ceil(runs / IN_ROW)


def differences(part: SubFigure, entries: Sequence[Entry]) -> None:
    """Draws a panel for each run that is compared with a baseline: its difference to the baseline's loss on a log axis,
    before those of all others in grey."""
    compared = [entry for entry in entries if not entry.is_baseline and entry.baseline and len(entry.loss_diff)]
    curves = [
        (steps_of_both(entry.run, entry.baseline), np.where(entry.loss_diff > 0, entry.loss_diff, np.nan))
        for entry in compared
        if entry.baseline
    ]
    panels = [*part.subplots(max(rows_of(len(compared)), 1), IN_ROW, sharex=True, sharey=True, squeeze=False).flat]
    for axes, entry, (steps, difference) in zip(panels, compared, curves, strict=False):
        for others in curves:
            axes.plot(*others, color="0.85", linewidth=0.6)
        axes.plot(steps, difference, color="#0072B2", linewidth=1.4)
        lost = steps[~np.isfinite(entry.loss_diff)]
        axes.plot(lost, np.ones(len(lost)), "^", color="#D55E00", transform=axes.get_xaxis_transform())
        label = entry.label if len(entry.label) <= LONGEST else f"...{entry.label[3 - LONGEST :]}"
        axes.set_title(label, fontsize=7)
        axes.set_yscale("log")
        axes.tick_params(labelsize=7)
    for axes in panels[len(compared) :]:
        axes.set_axis_off()
    part.supylabel("|loss - baseline's|", fontsize=9)
    part.supxlabel("step   (grey: the other runs; gap: no difference; triangle: a loss is inf or NaN)", fontsize=9)
