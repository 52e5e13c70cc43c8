"""The figure of lost digits: a row a layer, how much of its output and its gradient one rounding is."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from mpcompare.report import digits as maps
from mpcompare.report.contents import Report
from mpcompare.report.digits_row import DigitsRow, Map, half_lost
from mpcompare.report.figures.kit import COLOURS, parts_of
from mpcompare.verdict.judge.replayed import percent

MOST = 40  # rows that fit a page
ROW, AROUND = 0.19, 1.1  # inches: a row, and what stands above and below a panel
PANEL, LETTER = 3.6, 0.062  # inches: width of a panel, and of a letter of its texts
Panel = tuple[Map, Sequence[DigitsRow]]  # the map of a precision, and its rows that are drawn
PARTS = {"output": ("s", COLOURS[0]), "gradient": ("o", COLOURS[1])}


def digits(report: Report) -> Figure | None:
    """Draws a panel for each precision of 16 bits; None where no run in one shows its layers."""
    drawn = [[(each, worst_rows(each)) for each in maps.shown(c)] for c in report.finished]
    rows = [row for panels in drawn for _, chosen in panels for row in chosen]
    letters = sum(max((len(text(row)) for row in rows), default=0) for text in (_named, _said))
    height = max((sum(map(_inches, panels)) for panels in drawn), default=0.0)
    missing = "no run in 16 bits shows its layers"
    return parts_of(report.finished, drawn, _part, height, PANEL + LETTER * letters, missing)


def _inches(panel: Panel) -> float:
    return AROUND + ROW * len(panel[1])


def _part(part: SubFigure, panels: Sequence[Panel]) -> None:
    each_axes = part.subplots(len(panels), 1, squeeze=False, height_ratios=list(map(_inches, panels)))[:, 0]
    for axes, (each, chosen) in zip(each_axes, panels, strict=True):
        _panel(axes, each, chosen)
    handles, labels = each_axes[0].get_legend_handles_labels()
    part.legend(handles, labels, loc="outside lower left", ncols=3, fontsize=8, frameon=False)


def worst_rows(each: Map) -> list[DigitsRow]:
    """Returns the rows that are drawn, in the order of forward. Of many rows these are layers that should stay in fp32,
    and layers that lose the most digits."""
    kept = {row.place for row in sorted(each.rows, key=lambda row: row.rank, reverse=True)[:MOST]}
    return [row for row in each.rows if row.place in kept]


def _named(row: DigitsRow) -> str:
    return f"{row.name} ({row.digits.kind})" if row.digits.kind else row.name


def _said(row: DigitsRow) -> str:
    return f"  {row.because}" if row.why else ""


def _panel(axes: Axes, each: Map, rows: Sequence[DigitsRow]) -> None:
    u, half = each.precision.unit_roundoff, half_lost(each.precision)
    held, heights = round(-math.log2(u)), np.arange(len(rows))
    for part, (marker, colour) in PARTS.items():
        errors = np.array([getattr(row.digits, part) for row in rows])
        inside = np.where((errors > 0) & (errors <= 1), np.maximum(errors, u / 4), np.nan)
        axes.scatter(inside, heights, s=16, marker=marker, color=colour, label=f"its {part}", zorder=3)
        beyond = heights[errors > 1]
        axes.plot(np.full(len(beyond), 0.985), beyond, ">", color=colour, transform=axes.get_yaxis_transform())
    axes.axvspan(half, 2, color="0.93", zorder=0, linewidth=0)
    axes.axvline(half, color="black", linewidth=1, linestyle="--", label="half of the digits are lost")
    axes.set_xscale("log")
    axes.set_xlim(u / 5, 2)
    lost = range(0, held + 1, 2)
    axes.set_xticks([u * 2**n for n in lost], [f"{n}\n{percent(u * 2**n)}" for n in lost], fontsize=7)
    axes.minorticks_off()
    axes.set_yticks(heights, [_named(row) for row in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
    axes.tick_params(axis="y", length=0)
    for height, row in zip(heights, rows, strict=True):
        if text := _said(row):
            axes.get_yticklabels()[height].set_fontweight("bold" if row.advice else "normal")
            axes.annotate(text, (1, height), xycoords=axes.get_yaxis_transform(), va="center", fontsize=7)
    left_out = len(each.digits) - len(rows)
    more = f"\nthe {len(rows)} places that lose the most; {left_out} others are left out" if left_out else ""
    axes.set_title(f"{each.entry.label}, {each.when}{more}", fontsize=9, loc="left")
    axes.set_xlabel(f"lost digits of {held}, and the error", fontsize=8)
