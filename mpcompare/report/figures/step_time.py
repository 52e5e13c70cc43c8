"""The figure of step times: median and spread, and the ratio to the baseline's time."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mpcompare.report.comparison import Entry
from mpcompare.report.contents import Report
from mpcompare.report.figures.bars import bars, beside
from mpcompare.report.figures.kit import colour


def step_time(report: Report) -> Figure | None:
    """Draws a bar a run; None where no run finished."""
    return bars(report.finished, _step_time, room=2.2) if report.finished else None


def _step_time(axes: Axes, entries: Sequence[Entry]) -> None:
    timed = [entry.run.finished.blocks for entry in entries]
    p20, p50, p80 = np.array([(each.step_ms_p20, each.step_ms_p50, each.step_ms_p80) for each in timed]).T
    colours = [colour(place) for place in range(len(entries))]
    axes.barh(range(len(entries)), p50, xerr=(p50 - p20, p80 - p50), color=colours, ecolor="0.2", capsize=4)
    for place, entry in enumerate(entries):
        beside(axes, p80[place], place, f"{p50[place]:.4g} ms, {_ratio(entry)}")
    axes.set_xlabel("ms a step: median, p20 to p80 of the blocks; in brackets the 95 % interval of time / baseline")


def _ratio(entry: Entry) -> str:
    if entry.is_baseline:
        return "baseline"
    if math.isnan(entry.time_ratio.low):
        return "too few blocks for a ratio"
    return f"{entry.time_ratio} of the baseline{'' if entry.side_by_side else ', not side by side'}"
