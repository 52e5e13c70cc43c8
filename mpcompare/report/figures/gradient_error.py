"""The figure of gradient errors: how far each run's gradients in the first step are from exact ones.

A row of dots is a tensor, or the tensors of equal layers together where a network has many layers.
"""

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import LogLocator

from mpcompare.report.contents import Report
from mpcompare.report.figures import grouping, kit
from mpcompare.report.figures.judged import Judged, compared, judged
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
    tables = [table if (table := gradients_of(runs)).tensors else None for runs in judged(report)]
    height = max((table.height for table in tables if table), default=0.0)
    width = max((table.width for table in tables if table), default=0.0)
    return parts_of(report.finished, tables, _draw, height, max(WIDTH, width), "no run shows its gradients")


@dataclass(frozen=True)
class GradientTable:
    """The gradients of all runs of a comparison, in rows that fit a page."""

    runs: Sequence[Judged]  # runs with one reference stand together
    # the tensors that the loss does not depend on, such as a bias before a norm. They are left out: relative errors
    # say nothing of them.
    vanishing: Sequence[str]
    # ``||gradient - exact|| / ||exact||``, a row a run and a column a tensor in the order of the network; inf where the
    # gradient is missing or no number, NaN where the run shows no gradients
    errors: pd.DataFrame
    limits: pd.DataFrame  # the limits of ``errors``; NaN where there is none

    @property
    def tensors(self) -> list[str]:
        return [str(name) for name in self.errors]

    @cached_property
    def ratios(self) -> pd.DataFrame:
        """``errors`` over ``limits``."""
        return self.errors / self.limits

    @property
    def labels(self) -> list[str]:
        """The label of each run, and why it has no errors."""
        without = ("" if run.gradients else ": shows none" if run.findings else ": not examined" for run in self.runs)
        named = (run.entry.label + (" (reference)" if run.is_reference else "") for run in self.runs)
        return [name + why for name, why in zip(named, without, strict=True)]

    @property
    def inches(self) -> float:
        """The height of a row."""
        return max(ROW, LANE * len(self.runs) + GAP)

    @cached_property
    def rows(self) -> list[list[str]]:
        """The tensors of each row.

        There is a row for each tensor where there is room. Else tensors of the same part and class of layer stand
        together: first tensors that differ in the number of their block alone, then in any number, then all of them.
        """

        def with_kind(shortened: Callable[[str], str]) -> grouping.Key:
            return lambda tensor: (shortened(tensor), self.kind(tensor))

        shorter = (grouping.without_first_number, grouping.without_block_numbers, grouping.without_numbers)
        keys: list[grouping.Key] = [str, *map(with_kind, shorter), self.kind, lambda _: "all"]
        return grouping.groups_of(self.tensors, keys, int(HIGHEST / self.inches))

    @cached_property
    def names(self) -> list[str]:
        """The name of each row, with the number of its tensors where it holds several."""
        return [row[0] if len(row) == 1 else f"{self._name(row)} ({len(row)})" for row in self.rows]

    @cached_property
    def worst(self) -> list[tuple[str, str] | None]:
        """By row, the tensor that is farthest above its limit, and the colour of its run; None where every error is
        within its limit."""
        found: list[tuple[str, str] | None] = []
        for row in self.rows:
            ratios = self.ratios[row].fillna(0.0).to_numpy()
            run, tensor = divmod(int(ratios.argmax()), len(row))
            name = f"  {row[tensor]}" if len(row) > 1 else ""
            text = f"{ratios[run, tensor]:.3g}{name}"
            found.append((text, kit.colour(self.runs[run].place)) if ratios[run, tensor] > 1 else None)
        return found

    @property
    def width(self) -> float:
        """Inches of the figure."""
        sides = max(map(len, self.names)), max(len(each[0]) if each else 0 for each in self.worst)
        return PANELS + LETTER * sum(sides)

    @property
    def columns(self) -> int:
        """The columns of the legend."""
        return min(kit.columns(self.labels, self.width), 2)

    @property
    def height(self) -> float:
        """Inches of the figure below its title."""
        lines = math.ceil(len(self.runs) / self.columns) + 7  # of the legend, and of the caption, which has at most 7
        return AROUND + LINE * lines + self.inches * len(self.rows)

    def kind(self, tensor: str) -> str:
        """Returns the class of the layer that holds a tensor and the tensor's name in it, such as ``Linear weight``."""
        return next(filter(None, (run.kind(tensor) for run in self.runs)), tensor.rpartition(".")[2])

    def _name(self, tensors: Sequence[str]) -> str:
        first, *others = {self.kind(tensor) for tensor in tensors}
        return grouping.span(tensors) or ("all tensors" if others else first)


def gradients_of(runs: Sequence[Judged]) -> GradientTable:
    """Returns the errors of the gradients of these runs, which are all of one comparison."""
    named = dict.fromkeys(tensor for run in runs for tensor in run.gradients)
    norms = {tensor: max(run.norm(tensor) for run in runs) for tensor in named}
    largest = max(filter(math.isfinite, norms.values()), default=0.0)
    vanishing = [tensor for tensor, norm in norms.items() if norm < NOTHING * largest]
    tensors = [tensor for tensor in named if tensor not in vanishing]
    owners = [run.entry for run in runs if run.is_reference]
    order = sorted(runs, key=lambda r: owners.index(r.reference) if r.reference in owners else len(owners))
    errors = [[relative_error(r.gradients.get(t)) if r.gradients else math.nan for t in tensors] for r in order]
    limits = [[_relative_limit(run, runs, tensor) for tensor in tensors] for run in order]
    return GradientTable(order, vanishing, *(pd.DataFrame(each, columns=tensors) for each in (errors, limits)))


def _relative_limit(run: Judged, runs: Sequence[Judged], tensor: str) -> float:
    """The limit of a run's error, or, for a reference, of the runs that were compared with it; NaN if there is none."""
    reference = next((other for other in runs if other.entry is run.reference), run)
    norm = run.norm(tensor) or reference.norm(tensor)  # the reference's for a gradient that is missing
    judges = compared(run, runs) if run.is_reference else [run]
    limits = [judge.limit(("gradients", "layers"), f"gradient {FIRST}", tensor) for judge in judges]
    return next((limit / norm for limit in limits if math.isfinite(limit) and norm), math.nan)


def _draw(part: SubFigure, table: GradientTable) -> None:
    """Draws the errors, and next to them the errors over their limits, if any are known."""
    if np.isfinite(table.limits).any(axis=None):
        axes, beside = part.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        _panel(beside, table, table.ratios)
        beside.axvline(1, color="black", linewidth=1.2)
        beside.set_xlim(min(0.5, beside.get_xlim()[0]), max(2.0, beside.get_xlim()[1]))
        beside.set_xlabel("error / its limit", fontsize=9)
        for row, worst in enumerate(table.worst):
            if worst:
                text, colour = worst
                beside.annotate(text, (1, row), (4, 0), xycoords=beside.get_yaxis_transform(), va="center", fontsize=7,
                                textcoords="offset points", color=colour)  # fmt: skip
    else:
        axes = part.subplots()
    _panel(axes, table, table.errors)
    axes.set_yticks(range(len(table.names)), table.names, fontsize=7)
    axes.set_ylim(len(table.names) - 0.5, -0.5)
    axes.set_xlabel(ERROR, fontsize=9)
    handles, labels = axes.get_legend_handles_labels()
    part.legend(handles, labels, title=_caption(table), loc="outside lower left", ncols=table.columns,
                fontsize=8, title_fontsize=8, alignment="left", frameon=False)  # fmt: skip


def _caption(table: GradientTable) -> str:
    lines = ["gradient in the first step", "exact: float64 from the operands that each layer had"]
    lines.append("no dot: no error; triangle at the right end: inf, NaN or missing")
    if len(table.rows) < len(table.tensors):
        lines.append("a row with (n) holds n tensors of equal layers")
    if any(table.worst):
        lines.append("above its limit: the largest of each row, in the colour of its run")
    if table.vanishing:
        names = ", ".join(table.vanishing[:3]) + (", ..." if len(table.vanishing) > 3 else "")
        remark = f"not drawn, exactly 0 ({len(table.vanishing)}): {names}"
        lines += textwrap.wrap(remark, int(table.width / LETTER), max_lines=2)
    return "\n".join(lines)


def _panel(axes: Axes, table: GradientTable, values: pd.DataFrame) -> None:
    """Draws a lane for each run in every row; values that are beyond the axis are triangles at its right end."""
    lane = (1 - GAP / table.inches) / len(table.runs)
    rows = pd.Series({tensor: row for row, tensors in enumerate(table.rows) for tensor in tensors})[table.tensors]
    for number, (run, label) in enumerate(zip(table.runs, table.labels, strict=True)):
        value = values.iloc[number]
        heights = rows + (number - (len(table.runs) - 1) / 2) * lane
        colour, marker = kit.colour(run.place), kit.marker(run.place)
        shown = value.where(value > 0)
        axes.scatter(shown, heights, s=10, color=colour, marker=marker, linewidths=0, alpha=0.75, label=label)
        beyond = heights[value == np.inf]
        ends = np.full(len(beyond), 0.985)
        axes.plot(ends, beyond, ">", color=colour, markersize=3.5, transform=axes.get_yaxis_transform())
    axes.set_xscale("log")
    if len(all_shown := positive(values.to_numpy().flatten())):
        axes.set_xlim(all_shown.min() / 2, all_shown.max() * 2)
    axes.xaxis.set_major_locator(LogLocator(numticks=6))
    for row in range(0, len(table.rows), 2):
        axes.axhspan(row - 0.5, row + 0.5, color="0.95", zorder=0, linewidth=0)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
