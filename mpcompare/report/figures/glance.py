"""The figure of all runs at a glance: the verdict on each, and its time and memory over the baseline's."""

import math
import textwrap
from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from mpcompare.race.intervals import Interval
from mpcompare.report.comparison import Comparison, Entry
from mpcompare.report.contents import Report
from mpcompare.report.figures.kit import parts_of
from mpcompare.report.verdicts import COLOURS

ROW, AROUND = 0.26, 0.9  # inches: height of a run, and of what stands above and below all
WIDE, NARROW, LETTER = 10.4, 3.2, 0.075  # inches: the figure and each panel at the least, and a letter of its texts


def glance(report: Report) -> Figure | None:
    """Draws a row a run, what differs first; None where no run finished."""
    names = [_name(entry) for comparison in report.finished for entry in comparison.entries]
    most = max((len(comparison.entries) for comparison in report.finished), default=0)
    beside = LETTER * max(map(len, names), default=0)
    width = max(WIDE, beside + 2 * NARROW)
    draw = partial(_draw, most=most, letters=int((width - beside) / 2 / LETTER))
    return parts_of(report.finished, report.finished, draw, AROUND + ROW * most, width)


def _name(entry: Entry) -> str:
    return f"{entry.label}: {entry.word} {entry.word.sign}"


def _draw(part: SubFigure, comparison: Comparison, most: int, letters: int) -> None:
    """Draws a row a run; a line below a panel has so many letters."""
    entries = sorted(comparison.entries, key=lambda entry: entry.word.rank)
    time, memory = part.subplots(1, 2, sharey=True)
    colours = [COLOURS[entry.word.kind] for entry in entries]
    _ratios(time, [entry.time_ratio for entry in entries], colours)
    _ratios(memory, [Interval(*[entry.memory_ratio] * 3) for entry in entries], colours)
    baselines = {comparison.label(entry.baseline) for entry in entries if entry.baseline}
    versus = baselines.pop() if len(baselines) == 1 else "baseline"
    said = {time: f"time of a step / {versus}'s\n(line: 95 % interval)"}
    said[memory] = f"peak memory / {versus}'s\n(smaller is better)"
    for axes, text in said.items():
        lines = [piece for each in text.splitlines() for piece in textwrap.wrap(each, letters)]
        axes.set_xlabel("\n".join(lines), fontsize=9)
    time.set_yticks(range(len(entries)), [*map(_name, entries)], fontsize=9)
    for text, colour in zip(time.get_yticklabels(), colours, strict=True):
        text.set_color(colour)
    time.set_ylim(most - 0.4, -0.6)
    memory.tick_params(labelleft=False)


def _ratios(axes: Axes, ratios: Sequence[Interval], colours: Sequence[str]) -> None:
    """Draws a dot a run with its interval, and the number next to it; without an interval there is neither."""
    ends = [each.high for each in ratios if math.isfinite(each.high)]
    right = max([1.0, *ends])
    for place, (each, colour) in enumerate(zip(ratios, colours, strict=True)):
        if not math.isfinite(each.low):
            axes.annotate("cannot be told", (0, place), (4, 0), textcoords="offset points", va="center", fontsize=8,
                          color="0.4")  # fmt: skip
            continue
        axes.barh(place, each.median, 0.5, color=colour, alpha=0.3, linewidth=0)
        axes.plot([each.low, each.high], [place, place], color=colour, linewidth=2.5, solid_capstyle="butt")
        axes.plot(each.median, place, "o", color=colour, markersize=5)
        axes.annotate(f"{each.median:.2f}", (1.03 * right, place), va="center", fontsize=9)
    axes.axvline(1, color="0.3", linestyle="--", linewidth=1, zorder=0)
    axes.set_xlim(0, 1.18 * right)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
