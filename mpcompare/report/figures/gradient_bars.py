"""The gradient errors of a small network: bars by tensor, one a run, below their limits."""

import numpy as np
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure

from mpcompare.report.figures.gradients import GradientTable, Series
from mpcompare.report.figures.kit import at_the_top, hatch, legend, positive

INCHES = 0.14  # width of a bar, and of the gap beside it


def width_of(gradients: GradientTable) -> float:
    """Returns the inches that the bars take."""
    return INCHES * len(gradients.series) * (len(gradients.tensors) + len(gradients.vanishing))


def draw(part: SubFigure, gradients: GradientTable, ylabel: str, xlabel: str) -> None:
    axes = part.subplots()
    axes.set_title(gradients.remark, fontsize=7, loc="right")
    tensors, series = gradients.tensors, gradients.series
    width, heights = 0.8 / len(series), []
    for place, each in enumerate(series):
        middle = np.arange(len(tensors)) + (place - (len(series) - 1) / 2) * width
        _bars(axes, each, middle, width)
        _limits(axes, middle, width, each.limits)
        heights += [*each.errors, *each.limits]
    axes.set_xticks(range(len(tensors)), tensors)
    if sum(map(len, tensors)) > 64:
        axes.tick_params(axis="x", labelrotation=35, labelsize=8)
        for text in axes.get_xticklabels():
            text.set_horizontalalignment("right")
    axes.set_yscale("log")
    if len(shown := positive(heights)):
        axes.set_ylim(shown.min() / 3, shown.max() * 2)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.set_ylabel(ylabel)
    axes.set_xlabel(f"{xlabel}\n(gap: no error; triangle: inf, NaN or missing)", fontsize=9)
    legend(part, *axes.get_legend_handles_labels())  # below: it hides no bar


def _bars(axes: Axes, series: Series, middle: np.ndarray, width: float) -> None:
    run, errors = series.run, series.errors
    axes.bar(
        middle,
        np.where(np.isfinite(errors), errors, 0),
        width,
        color=run.colour,
        hatch=hatch(run.place),
        edgecolor="white",
        linewidth=0.5,
        label=series.label,
    )
    at_the_top(axes, middle[errors == np.inf], run.colour, 0.97)


def _limits(axes: Axes, middle: np.ndarray, width: float, limits: np.ndarray) -> None:
    outline = [patheffects.withStroke(linewidth=3.5, foreground="white")]
    ticks = axes.hlines(limits, middle - width / 2, middle + width / 2, color="black", lw=1.8, path_effects=outline)
    if np.isfinite(limits).any() and "limit" not in axes.get_legend_handles_labels()[1]:
        ticks.set_label("limit")
