"""The figure of noise: the distance of each run's loss from its reference's, compared with correct runs' distances."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from mpcompare.report.contents import Report
from mpcompare.report.figures.judged import Judged, compared, judged, references
from mpcompare.report.figures.kit import at_the_top, colour, line, marker, parts_of, positive
from mpcompare.verdict.judge.run import LOSS
from mpcompare.verdict.judge.trajectories import steps_of_both


def noise(report: Report) -> Figure | None:
    """Draws the differences of losses before a band: how far correct runs are from each other. A reference has a panel
    if it has a band or a run was compared with it. None where there is neither a band nor a run to compare."""
    every = [[(r, compared(r, runs)) for r in references(runs)] for runs in judged(report)]
    drawn = [[(r, others) for r, others in panels if r.noise is not None or others] for panels in every]
    height = 1.0 + 3.2 * max(map(len, drawn), default=0)
    return parts_of(report.finished, drawn, _part, height, missing="nothing to compare with")


def _part(part: SubFigure, panels: Sequence[tuple[Judged, Sequence[Judged]]]) -> None:
    rows = part.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (reference, others) in zip(rows, panels, strict=True):
        _panel(axes, reference, others)
        axes.set_ylabel("|training loss - reference's|" if len(panels) < 3 else "|loss - reference's|")
    rows[-1].set_xlabel("step   (gap: no difference; triangle: a loss is inf or NaN)")
    rows[-1].xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def _panel(axes: Axes, reference: Judged, runs: Sequence[Judged]) -> None:
    band, differences = reference.noise, [run.difference for run in runs]
    limits = dict.fromkeys(limit for run in runs if math.isfinite(limit := run.limit(("run",), LOSS)))
    shown = positive([*itertools.chain(*differences), *(band if band is not None else ()), *limits])
    bottom, top = (shown.min() / 2, shown.max() * 3) if len(shown) else (1e-9, 1.0)
    if band is not None:
        _band(axes, reference, band, bottom, top)
    for limit in limits:
        axes.axhline(limit, color="0.2", linestyle="--", linewidth=1.2, label="limit")
    for run, difference in zip(runs, differences, strict=True):
        number = steps_of_both(run.run, reference.run)
        visible = np.where(difference > 0, difference, np.nan)
        marks = {"marker": marker(run.place), "markersize": 3, "markevery": 1}
        axes.plot(number, visible, label=run.entry.label, **{**line(run.place), **marks})
        at_the_top(axes, number[~np.isfinite(difference)], colour(run.place), 0.97)
    axes.set_yscale("log")
    axes.set_ylim(bottom, top)
    axes.grid(alpha=0.3)
    title = f"reference: {reference.entry.label}" + ("" if runs else ", and no other run to compare with it")
    axes.legend(title=title, alignment="left", loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False,
                fontsize=8, title_fontsize=9, borderaxespad=0)  # fmt: skip


def _band(axes: Axes, reference: Judged, band: np.ndarray, bottom: float, top: float) -> None:
    """The largest difference between correct runs, step by step; to the top where it is no number."""
    height = np.where(np.isfinite(band), band, top)
    before = int(reference.run.steps["step"].iloc[0]) - 1
    steps, ends = np.arange(before, before + len(band) + 2), np.concatenate((height[:1], height, height[-1:]))
    label = f"noise: {reference.noise_runs + 1} runs of {reference.entry.label}"
    axes.fill_between(steps, bottom, ends, step="mid", color="0.85", linewidth=0, zorder=0, label=label)
    axes.set_xlim(before + 0.5, before + len(band) + 0.5)
