"""The figure of gradient errors: how far each run's gradients in the first step are from exact ones.

A row of dots is a tensor, or the tensors of equal layers together where a network has many layers.
"""

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import LogLocator

from mpcompare.report.contents import Report
from mpcompare.report.figures import grouping, kit
from mpcompare.report.figures.judged import Judged, compared, judged, references
from mpcompare.report.figures.kit import WIDTH, parts_of, positive
from mpcompare.verdict.judge.errors import relative_error
from mpcompare.verdict.judge.gradients import FIRST

HIGHEST = 8.4  # inches of all rows together, so that the figure fits a page
ROW, LANE, GAP = 0.17, 0.045, 0.06  # inches: height of a row at least, of a run in it, and between two rows
LETTER, LINE = 0.06, 0.17  # inches: width of a letter and height of a line of small text
PANELS, AROUND = 6.0, 1.4  # inches: width of the panels, height of what stands above and below them, less the legend
ERROR = "||gradient - exact|| / ||exact||"
NOTHING = 1e-10  # times the largest gradient's norm: a smaller one is the rounding of float64 alone


def gradient_error(report: Report) -> Figure | None:
    """Draws a row of dots for each tensor, or for each kind of tensor; None where no run shows its gradients."""
    every = [gradients_of(runs) for runs in judged(report)]
    drawn = [(gradients, layout) if (layout := layout_of(gradients)) else None for gradients in every]
    layouts = [pair[1] for pair in drawn if pair]
    height = max((layout.height for layout in layouts), default=0.0)
    width = max((layout.width for layout in layouts), default=0.0)
    return parts_of(report.finished, drawn, _draw, height, max(WIDTH, width), "no run shows its gradients")


@dataclass(frozen=True)
class Series:
    """The gradients of one run."""

    run: Judged
    # ``||gradient - exact|| / ||exact||`` by tensor; inf where the gradient is missing or no number, NaN where the run
    # shows no gradients
    errors: np.ndarray
    limits: np.ndarray  # the limits of ``errors``; NaN where there is none

    @property
    def ratios(self) -> np.ndarray:
        """``errors`` over ``limits``."""
        return self.errors / self.limits

    @property
    def label(self) -> str:
        """The label of the run, and why it has no errors."""
        run = self.run
        without = "" if run.gradients else ": shows none" if run.findings else ": not examined"
        return run.entry.label + (" (reference)" if run.is_reference else "") + without


@dataclass(frozen=True)
class GradientTable:
    """The gradients of all runs of a comparison."""

    tensors: list[str]  # the names, in the order of the network
    # the tensors that the loss does not depend on, such as a bias before a norm. They are left out: relative errors
    # say nothing of them.
    vanishing: list[str]
    series: list[Series]  # runs with one reference stand together

    @property
    def remark(self) -> str:
        """The tensors that are left out; empty if none are."""
        names = ", ".join(self.vanishing[:3]) + (", ..." if len(self.vanishing) > 3 else "")
        return f"not drawn, exactly 0 ({len(self.vanishing)}): {names}" if names else ""


def gradients_of(runs: Sequence[Judged]) -> GradientTable:
    """Returns the errors of the gradients of these runs, which are all of one comparison."""
    named = list(dict.fromkeys(tensor for run in runs for tensor in run.gradients))
    vanishing = _vanishing(runs, named)
    tensors = [tensor for tensor in named if tensor not in vanishing]
    owners = [run.entry for run in references(runs)]
    order = sorted(runs, key=lambda r: owners.index(r.reference) if r.reference in owners else len(owners))
    series = [
        Series(
            run,
            np.array([relative_error(run.gradients.get(t)) if run.gradients else math.nan for t in tensors]),
            np.array([_relative_limit(run, runs, tensor) for tensor in tensors]),
        )
        for run in order
    ]
    return GradientTable(tensors, vanishing, series)


def _vanishing(runs: Sequence[Judged], tensors: Sequence[str]) -> list[str]:
    norms = {tensor: max(run.norm(tensor) for run in runs) for tensor in tensors}
    finite = [norm for norm in norms.values() if math.isfinite(norm)]
    return [tensor for tensor, norm in norms.items() if norm < NOTHING * max(finite, default=0.0)]


def _relative_limit(run: Judged, runs: Sequence[Judged], tensor: str) -> float:
    """The limit of a run's error, or, for a reference, of the runs that were compared with it; NaN if there is none."""
    reference = next((other for other in runs if other.entry is run.reference), run)
    norm = run.norm(tensor) or reference.norm(tensor)  # the reference's for a gradient that is missing
    judges = compared(run, runs) if run.is_reference else [run]
    limits = [judge.limit(("gradients", "layers"), f"gradient {FIRST}", tensor) for judge in judges]
    return next((limit / norm for limit in limits if math.isfinite(limit) and norm), math.nan)


@dataclass(frozen=True)
class Layout:
    """The rows of a comparison."""

    rows: Sequence[Sequence[int]]  # the places of the tensors of each row
    names: Sequence[str]  # the names of the rows
    # by row, the tensor that is farthest above its limit, and the colour of its run; None where every error is within
    # its limit
    worst: Sequence[tuple[str, str] | None]
    inches: float  # height of a row
    legend: float  # inches of the legend and what is written with it

    @property
    def width(self) -> float:
        """Inches of the figure."""
        sides = max(map(len, self.names)), max(len(each[0]) if each else 0 for each in self.worst)
        return PANELS + LETTER * sum(sides)

    @property
    def height(self) -> float:
        """Inches of the figure below its title."""
        return AROUND + self.legend + self.inches * len(self.rows)


def layout_of(gradients: GradientTable) -> Layout | None:
    """Returns rows that fit a page; None where no run shows its gradients.

    There is a row for each tensor where there is room. Else tensors of the same part and class of layer stand together:
    first tensors that differ in the number of their block alone, then in any number, then all of them.
    """
    if not gradients.tensors:
        return None
    inches = max(ROW, LANE * len(gradients.series) + GAP)
    kinds = {tensor: _kind(gradients, tensor) for tensor in gradients.tensors}

    def with_kind(shortened: Callable[[str], str]) -> grouping.Key:
        return lambda tensor: (shortened(tensor), kinds[tensor])

    shorter = (grouping.without_first_number, grouping.without_block_numbers, grouping.without_numbers)
    keys: list[grouping.Key] = [str, *map(with_kind, shorter), kinds.__getitem__, lambda _: "all"]
    groups = grouping.groups_of(gradients.tensors, keys, int(HIGHEST / inches))
    place = {tensor: number for number, tensor in enumerate(gradients.tensors)}
    rows = [[place[tensor] for tensor in group] for group in groups]
    names = [_name(group, {kinds[tensor] for tensor in group}) for group in groups]
    lines = math.ceil(len(gradients.series) / 2) + 7  # the caption has at most 7
    return Layout(rows, names, [_worst(gradients, places) for places in rows], inches, LINE * lines)


def _kind(gradients: GradientTable, tensor: str) -> str:
    """The class of the layer that holds a tensor and the tensor's name in it, such as ``Linear weight``."""
    kinds = (each.run.kind(tensor) for each in gradients.series)
    return next(filter(None, kinds), tensor.rpartition(".")[2])


def _name(tensors: Sequence[str], kinds: set[str]) -> str:
    """The name of a row, and the number of its tensors where it holds several."""
    if len(tensors) == 1:
        return tensors[0]
    return f"{grouping.span(tensors) or (next(iter(kinds)) if len(kinds) == 1 else 'all tensors')} ({len(tensors)})"


def _worst(gradients: GradientTable, places: Sequence[int]) -> tuple[str, str] | None:
    pairs = [(each, place) for each in gradients.series for place in places if each.ratios[place] > 1]
    if not pairs:
        return None
    series, place = max(pairs, key=lambda pair: float(pair[0].ratios[pair[1]]))
    name = f"  {gradients.tensors[place]}" if len(places) > 1 else ""
    return f"{series.ratios[place]:.3g}{name}", kit.colour(series.run.place)


def _draw(part: SubFigure, drawn: tuple[GradientTable, Layout]) -> None:
    """Draws the errors, and next to them the errors over their limits, if any are known."""
    gradients, layout = drawn
    series = gradients.series
    if any(np.isfinite(each.limits).any() for each in series):
        axes, beside = part.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        _panel(beside, series, [each.ratios for each in series], layout)
        beside.axvline(1, color="black", linewidth=1.2)
        beside.set_xlim(min(0.5, beside.get_xlim()[0]), max(2.0, beside.get_xlim()[1]))
        beside.set_xlabel("error / its limit", fontsize=9)
        for row, worst in enumerate(layout.worst):
            if worst:
                text, colour = worst
                beside.annotate(text, (1, row), (4, 0), xycoords=beside.get_yaxis_transform(), va="center", fontsize=7,
                                textcoords="offset points", color=colour)  # fmt: skip
    else:
        axes = part.subplots()
    _panel(axes, series, [each.errors for each in series], layout)
    axes.set_yticks(range(len(layout.names)), layout.names, fontsize=7)
    axes.set_ylim(len(layout.names) - 0.5, -0.5)
    axes.set_xlabel(ERROR, fontsize=9)
    handles, labels = axes.get_legend_handles_labels()
    part.legend(handles, labels, title=_caption(gradients, layout), loc="outside lower left", ncols=2,
                fontsize=8, title_fontsize=8, alignment="left", frameon=False)  # fmt: skip


def _caption(gradients: GradientTable, layout: Layout) -> str:
    lines = ["gradient in the first step", "exact: float64 from the operands that each layer had"]
    lines.append("no dot: no error; triangle at the right end: inf, NaN or missing")
    if len(layout.rows) < len(gradients.tensors):
        lines.append("a row with (n) holds n tensors of equal layers")
    if any(layout.worst):
        lines.append("above its limit: the largest of each row, in the colour of its run")
    lines += textwrap.wrap(gradients.remark, int(layout.width / LETTER), max_lines=2)
    return "\n".join(lines)


def _panel(axes: Axes, series: Sequence[Series], values: Sequence[np.ndarray], layout: Layout) -> None:
    """Draws a lane for each run in every row; values that are beyond the axis are triangles at its right end."""
    lane = (1 - GAP / layout.inches) / len(series)
    for number, (each, value) in enumerate(zip(series, values, strict=True)):
        heights = np.empty(len(value))
        for row, places in enumerate(layout.rows):
            heights[list(places)] = row + (number - (len(series) - 1) / 2) * lane
        colour, marker = kit.colour(each.run.place), kit.marker(each.run.place)
        shown = np.where(value > 0, value, np.nan)
        axes.scatter(shown, heights, s=10, color=colour, marker=marker, linewidths=0, alpha=0.75, label=each.label)
        beyond = heights[value == np.inf]
        ends = np.full(len(beyond), 0.985)
        axes.plot(ends, beyond, ">", color=colour, markersize=3.5, transform=axes.get_yaxis_transform())
    axes.set_xscale("log")
    if len(shown := positive(np.concatenate(values))):
        axes.set_xlim(shown.min() / 2, shown.max() * 2)
    axes.xaxis.set_major_locator(LogLocator(numticks=6))
    for row in range(0, len(layout.rows), 2):
        axes.axhspan(row - 0.5, row + 0.5, color="0.95", zorder=0, linewidth=0)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
