"""The figures of time: a step's median, spread and ratio to the baseline's; and the time of each of its phases."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mpcompare.numerals import short
from mpcompare.phases import PHASES, WHOLE_STEP
from mpcompare.report.clock import clocks_cost
from mpcompare.report.comparison import Entry, phases_of
from mpcompare.report.contents import Report
from mpcompare.report.figures.kit import ON_LIGHT, bars, beside, colour, one_legend

# The colour of each phase, in their order: Okabe and Ito's palette, but for the fourth, which is from ColorBrewer's
# Dark2. Colour-blind readers tell it from the phases next to it better than the palette's blue and vermilion.
_INKS = ("#56B4E9", "#E69F00", "#F0E442", "#7570B3", "#009E73", "#CC79A7", "#BBBBBB")
COLOURS: dict[str, str] = dict(zip((*PHASES, WHOLE_STEP), _INKS, strict=True))
LABELLED = 0.12  # share of the longest bar: a shorter piece has no room for its number


def step_time(report: Report) -> Figure | None:
    """Draws a bar a run; None where no run finished."""
    return bars(report.finished, _step_time)


def _step_time(axes: Axes, entries: Sequence[Entry]) -> None:
    timed = [entry.run.finished.blocks for entry in entries]
    p20, p50, p80 = np.array([(each.step_ms_p20, each.step_ms_p50, each.step_ms_p80) for each in timed]).T
    colours = [colour(place) for place in range(len(entries))]
    axes.barh(range(len(entries)), p50, xerr=(p50 - p20, p80 - p50), color=colours, ecolor="0.2", capsize=4)
    for place, entry in enumerate(entries):
        beside(axes, p80[place], place, f"{short(p50[place])} ms, {_ratio(entry)}")
    axes.set_xlabel("ms a step: median, p20 to p80 of the blocks;\nin brackets the 95 % interval of time / baseline")


def _ratio(entry: Entry) -> str:
    if entry.is_baseline:
        return "baseline"
    if math.isnan(entry.time_ratio.low):
        return "too few rounds for a ratio"
    return f"{entry.time_ratio} of the baseline{'' if entry.side_by_side else ', not side by side'}"


def phases(report: Report) -> Figure | None:
    """Draws a panel a comparison, and one legend for all below them; None where no run finished."""
    if figure := bars(report.finished, _phases):
        one_legend(figure, list(COLOURS), ncols=6)
    return figure


def _phases(axes: Axes, entries: Sequence[Entry]) -> None:
    names = phases_of(entry.run for entry in entries)
    measured = [entry.run.finished.phases.phase_ms for entry in entries]
    pieces = [{name: phase_ms[name] or 0.0 for name in names if name in phase_ms} for phase_ms in measured]
    longest = max(sum(times.values()) for times in pieces)
    for place, (entry, times) in enumerate(zip(entries, pieces, strict=True)):
        right = 0.0
        for name, width in times.items():
            colour = COLOURS.get(name, "0.6")
            axes.barh(place, width, left=right, color=colour, edgecolor="white", linewidth=0.5, label=name)
            if width > LABELLED * longest:
                middle = (right + width / 2, place)
                axes.text(*middle, f"{width:.3g}", ha="center", va="center", fontsize=8, color=ON_LIGHT)
            right += width
        clock = "" if times.get(WHOLE_STEP) else f" (clock {clocks_cost(entry)})"
        beside(axes, right, place, f"{short(right)} ms{clock}")
    axes.set_xlabel("ms in each phase, with a clock between them\n(its cost against bare steps)")
