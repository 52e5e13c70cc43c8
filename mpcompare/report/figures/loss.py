"""The figures of the loss: the curves of all runs with their difference to the baseline's, and the differences of runs
from their references, compared with correct runs' differences."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from mpcompare.report.comparison import Entry
from mpcompare.report.contents import Report
from mpcompare.report.figures import kit
from mpcompare.report.figures.judged import Judged, compared, judged
from mpcompare.verdict.judge.run import LOSS
from mpcompare.verdict.judge.trajectories import loss_apart

MANY = 20  # runs that one panel can show: colours and dashes tell no more apart, and each has a panel of its own
IN_ROW, INCHES = 5, 1.25  # panels in a row, and the height of a row
LONGEST = 26  # characters of a panel's title


def loss(report: Report) -> Figure | None:
    """Draws loss curves above, their difference to the baseline below on a log axis; warm-up shaded, skipped steps
    marked. Evaluations during training are drawn, too: held-out loss, and its accuracy in a panel of its own. Where
    there are many runs, each has a panel of its own, with its difference alone. None where no run finished."""
    drawn = [comparison.finished for comparison in report.finished]
    most = max(map(len, drawn), default=0)
    if most > MANY:
        return kit.parts_of(report.finished, drawn, _differences, 0.6 + INCHES * math.ceil(most / IN_ROW), width=9)
    classes = any(_has_accuracy(entry) for entries in drawn for entry in entries)
    height = (8.0 if classes else 6.1) + max((kit.more_rows(_names(entries)) for entries in drawn), default=0)
    return kit.parts_of(report.finished, drawn, partial(_part, classes=classes), height)


def _names(entries: Sequence[Entry]) -> list[str]:
    return [entry.label + (" (baseline)" if entry.is_baseline else "") for entry in entries]


def _part(part: SubFigure, entries: Sequence[Entry], classes: bool) -> None:
    rows = part.subplots(3 if classes else 2, 1, sharex=True, height_ratios=(3, 2, 2)[: 3 if classes else 2])
    above, below = rows[0], rows[-1]
    if classes:
        _accuracy(rows[1], entries)
    for place, (entry, name) in enumerate(zip(entries, _names(entries), strict=True)):
        _curve(above, place, entry, name)
        if not entry.is_baseline and len(entry.loss_diff):
            _difference(below, place, entry.loss_diff, kit.dashed(place))
    evaluated = any(len(_evals(entry)) for entry in entries)
    if evaluated:
        above.plot([], [], label="held-out loss", **{**_held_out(0), "color": "0.3"})
    for axes in rows:
        axes.grid(alpha=0.3)
    kit.shade_warmup(rows, entries)
    kit.legend(part, *above.get_legend_handles_labels())
    above.set_ylabel("training and held-out loss" if evaluated else "training loss")
    below.set_yscale("log")
    below.set_ylabel("|loss - baseline's|")
    below.set_xlabel("step   (gap: no difference; triangle: a loss is inf or NaN; x above: skipped)")
    below.xaxis.set_major_locator(kit.whole_steps())
    if not below.lines:
        below.text(0.5, 0.5, "nothing to compare with", transform=below.transAxes, ha="center", color="0.4")


def _curve(axes: Axes, place: int, entry: Entry, name: str) -> None:
    steps = entry.run.steps
    below = {"linewidth": 5, "alpha": 0.45, "zorder": 1} if entry.is_baseline else {}
    style = {**kit.line(place), **below, "markevery": len(steps) // 7 + 1}
    kit.curve(axes, steps.set_index("step")["loss"], label=name, **style)
    skipped = steps[steps["skipped"]]
    axes.plot(skipped["step"], skipped["loss"], "x", color=kit.colour(place), markersize=8)
    if len(evals := _evals(entry)):
        axes.plot(evals["step"], evals["test_loss"], **_held_out(place))


def _difference(axes: Axes, place: int, difference: pd.Series, style: dict[str, Any]) -> None:
    """A log axis has no zero: equal losses leave a gap. A loss that is not finite is marked at the top."""
    marks = {"marker": kit.marker(place), "markersize": 3, "markevery": 1}
    axes.plot(difference.index, difference.where(difference > 0), **{**style, **marks})
    kit.at_the_top(axes, difference.index[~np.isfinite(difference)], kit.colour(place), 0.97)


def _accuracy(axes: Axes, entries: Sequence[Entry]) -> None:
    if not any(map(_has_accuracy, entries)):
        axes.text(0.5, 0.5, "not evaluated in between", transform=axes.transAxes, ha="center", color="0.4")
    for place, entry in enumerate(entries):
        if len(evals := _evals(entry)):
            axes.plot(evals["step"], evals["test_accuracy"], **_held_out(place))
    axes.set_ylabel("held-out accuracy")


def _evals(entry: Entry) -> pd.DataFrame:
    """The evaluations of a run during training and after; no rows if only after: the table has that number."""
    evals = entry.run.evals
    return evals if len(evals) > 1 else evals[:0]


def _has_accuracy(entry: Entry) -> bool:
    return bool(_evals(entry)["test_accuracy"].notna().any())


def _held_out(place: int) -> dict[str, Any]:
    """The style of evaluations: white squares, so that they are told from the training loss."""
    marks = {"marker": "s", "markersize": max(7 - place, 3), "markevery": 1, "markerfacecolor": "white", "zorder": 3}
    return {**kit.dashed(place), "linewidth": 0.8, **marks}


def _differences(part: SubFigure, entries: Sequence[Entry]) -> None:
    """Draws a panel for each run that has a baseline: its difference on a log axis, before all others' in grey."""
    compared = [entry for entry in entries if not entry.is_baseline and len(entry.loss_diff)]
    curves = [entry.loss_diff.where(entry.loss_diff > 0) for entry in compared]
    rows = max(math.ceil(len(compared) / IN_ROW), 1)
    panels = [*part.subplots(rows, IN_ROW, sharex=True, sharey=True, squeeze=False).flat]
    for axes, entry, own in zip(panels, compared, curves, strict=False):
        for others in curves:
            axes.plot(others.index, others, color="0.85", linewidth=0.6)
        kit.curve(axes, own, color="#0072B2", linewidth=1.4)
        kit.at_the_top(axes, own.index[~np.isfinite(entry.loss_diff)], "#D55E00", 1.0)
        label = entry.label if len(entry.label) <= LONGEST else f"...{entry.label[3 - LONGEST :]}"
        axes.set_title(label, fontsize=7)
        axes.set_yscale("log")
        axes.tick_params(labelsize=7)
    for axes in panels[len(compared) :]:
        axes.set_axis_off()
    part.supylabel("|loss - baseline's|", fontsize=9)
    part.supxlabel("step   (grey: the other runs; gap: no difference; triangle: a loss is inf or NaN)", fontsize=9)


def noise(report: Report) -> Figure | None:
    """Draws the differences of losses before a band: how far correct runs are from each other. A reference has a panel
    if it has a band or a run was compared with it. None where there is neither a band nor a run to compare."""
    every = [[(r, compared(r, runs)) for r in runs if r.is_reference] for runs in judged(report)]
    drawn = [[(r, others) for r, others in panels if r.noise is not None or others] for panels in every]
    inches = [[3.2 + kit.more_rows([run.entry.label for run in others]) for _, others in panels] for panels in drawn]
    height = 1.0 + max(map(sum, inches), default=0)
    return kit.parts_of(report.finished, drawn, _noise_part, height, missing="nothing to compare with")


def _noise_part(part: SubFigure, panels: Sequence[tuple[Judged, Sequence[Judged]]]) -> None:
    rows = part.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (reference, others) in zip(rows, panels, strict=True):
        _noise_panel(axes, reference, others)
        axes.set_ylabel("|training loss - reference's|" if len(panels) < 3 else "|loss - reference's|")
    rows[-1].set_xlabel("step   (gap: no difference; triangle: a loss is inf or NaN)")
    rows[-1].xaxis.set_major_locator(kit.whole_steps())


def _noise_panel(axes: Axes, reference: Judged, runs: Sequence[Judged]) -> None:
    band, differences = reference.noise, [loss_apart(run.run, reference.run) for run in runs]
    limits = dict.fromkeys(limit for run in runs if math.isfinite(limit := run.limit(("run",), LOSS)))
    shown = kit.positive([*chain(*differences), *(band if band is not None else ()), *limits])
    bottom, top = (shown.min() / 2, shown.max() * 3) if len(shown) else (1e-9, 1.0)
    if band is not None:
        _band(axes, reference, band, bottom, top)
    for limit in limits:
        axes.axhline(limit, color="0.2", linestyle="--", linewidth=1.2, label="limit")
    for run, difference in zip(runs, differences, strict=True):
        _difference(axes, run.place, difference, {**kit.line(run.place), "label": run.entry.label})
    axes.set_yscale("log")
    axes.set_ylim(bottom, top)
    axes.grid(alpha=0.3)
    title = f"reference: {reference.entry.label}" + ("" if runs else ", and no other run to compare with it")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles, labels, title=title, alignment="left", loc="lower left", bbox_to_anchor=(0, 1), frameon=False,
                ncols=min(kit.columns(labels), 3), fontsize=8, title_fontsize=9, borderaxespad=0)  # fmt: skip


def _band(axes: Axes, reference: Judged, band: np.ndarray, bottom: float, top: float) -> None:
    """The largest difference between correct runs, step by step; to the top where it is no number."""
    height = np.where(np.isfinite(band), band, top)
    before = int(reference.run.steps["step"].iloc[0]) - 1
    steps, ends = np.arange(before, before + len(band) + 2), np.concatenate((height[:1], height, height[-1:]))
    label = f"noise: {reference.noise_runs + 1} runs of {reference.entry.label}"
    axes.fill_between(steps, bottom, ends, step="mid", color="0.85", linewidth=0, zorder=0, label=label)
    axes.set_xlim(before + 0.5, before + len(band) + 0.5)
