"""The kit of all figures: a part a comparison, one colour a run, styles of lines, marks and legends, and bars."""

import logging
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from mpcompare.report.comparison import Comparison, Entry

# Okabe and Ito's palette, which colour-blind readers tell apart. A run also has dashes and a mark, so that no
# two of 42 runs look alike.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (9, 3)), (0, (3, 1, 1, 1, 1, 1)), (0, (2, 4)))
MARKERS = "osDP*d"  # six marks for seven colours; triangles are for values beyond an axis
# Text on light and on dark colours. They are no greys: the page turns greys over in the dark.
ON_LIGHT, ON_DARK = "#101011", "#fffffe"
WIDTH, LINE = 6.4, 0.16  # inches: a comparison, a line of its title
BAR, AROUND = 2.3, 0.3  # inches: the longest bar at the least, and what stands around names and panel
MANY = 8  # runs; if there are more, each has less room
Fill = Callable[[Axes, Sequence[Entry]], None]
T = TypeVar("T")
logging.getLogger("matplotlib").setLevel(logging.WARNING)  # its first run announces a font cache


def colour(place: int) -> str:
    """Returns the colour of a run, by its place among the finished runs of its comparison, from 0."""
    return COLOURS[place % len(COLOURS)]


def marker(place: int) -> str:
    """Returns the mark of a run."""
    return MARKERS[place % len(MARKERS)]


def dashes(place: int) -> Any:
    """Returns the dashes of a run's lines: the n-th run of a colour is one further in the list than the run before."""
    return DASHES[(place + place // len(COLOURS)) % len(DASHES)]


def dashed(place: int) -> dict[str, Any]:
    """Returns colour and dashes of a run's lines; from the second run of a colour on, also marks."""
    style = {"color": colour(place), "linestyle": dashes(place)}
    if place >= len(COLOURS):
        style |= {"marker": marker(place), "markersize": 4, "markevery": 0.15}
    return style


def line(place: int) -> dict[str, Any]:
    """Returns the style of lines that may coincide: the later ones are thinner, so that none hides another."""
    return {**dashed(place), "linewidth": max(2.6 - 0.5 * place, 1)}


def columns(labels: Sequence[str], width: float = WIDTH) -> int:
    """Returns the number of columns of a legend in which its labels have room, in so many inches."""
    longest = max(map(len, labels), default=1)
    return max(1, min(4, len(labels), int(width * 15 / (longest + 10))))


def more_rows(labels: Sequence[str]) -> float:
    """Returns the inches that a legend needs for its rows after the second."""
    return LINE * max(math.ceil(len(labels) / columns(labels)) - 2, 0)


def legend(part: SubFigure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Draws a legend below a part, in as many columns as the labels leave room for."""
    ncols = columns(labels, part.bbox.width / part.get_figure(root=True).dpi)
    part.legend(handles, labels, loc="outside lower center", ncols=ncols, fontsize=8, handlelength=4)


def curve(axes: Axes, values: pd.Series, **style: Any) -> None:
    """Draws a line over the index of ``values``. A point that no line reaches, without neighbours, has a mark."""
    axes.plot(values.index, values, **style)
    here = np.pad(np.isfinite(values.to_numpy(dtype=float)), 1)
    alone = values[here[1:-1] & ~here[:-2] & ~here[2:]]
    if len(alone):
        mark = {"marker": "o", "markersize": 2 + 2 * style.get("linewidth", 1)}
        axes.plot(alone.index, alone, **{**mark, **style, "linestyle": "none", "label": None, "markevery": 1})


def shade_warmup(panels: Iterable[Axes], entries: Sequence[Entry]) -> bool:
    """Shades the steps of the warm-up in each panel, and returns whether there are any."""
    steps = pd.concat([entry.run.steps.reindex(columns=["step", "warmup"]) for entry in entries])
    warmup = steps["step"][steps["warmup"].eq(True)]
    for axes in panels if len(warmup) else ():
        axes.axvspan(warmup.min() - 0.5, warmup.max() + 0.5, color="0.92", zorder=0, label="warm-up")
    return len(warmup) > 0


def whole_steps() -> MaxNLocator:
    """Returns the ticks of an axis of steps, which may have a single one."""
    return MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1)


def nothing(axes: Axes, why: str) -> None:
    """Leaves a panel empty and writes into it why."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center", color="0.4")


def parts_of(
    comparisons: Sequence[Comparison],
    contents: Sequence[T | None],
    draw: Callable[[SubFigure, T], None],
    height: float,
    width: float = WIDTH,
    missing: str = "",
) -> Figure | None:
    """Returns a figure with a part for each comparison, three in a row; None where there is nothing to draw in any.

    Args:
        contents: the values to draw for each comparison; a false value for nothing.
        draw: draws these values into the part.
        height: inches of a part below its title.
        width: inches of a part.
        missing: what the part says where there is nothing.
    """
    if not any(contents):
        return None
    rows = math.ceil(len(comparisons) / 3)
    in_row = math.ceil(len(comparisons) / rows)
    texts = [(c.title, c.dataset, c.not_the_same) for c in comparisons]
    letters = int(width * 13)
    titles = [[line for text in paragraphs for line in textwrap.wrap(text, letters)] for paragraphs in texts]
    height += LINE * max(map(len, titles))
    figure = Figure(figsize=(width * in_row, height * rows), layout="constrained")
    parts = list(figure.subfigures(rows, in_row, squeeze=False).flat)[: len(comparisons)]
    for part, title, content in zip(parts, titles, contents, strict=True):
        if title:
            part.suptitle("\n".join(title), fontsize=9, x=0.02, ha="left")
        if content:
            draw(part, content)
        else:
            nothing(part.subplots(), missing)
    return figure


def at_the_top(axes: Axes, x: np.ndarray, colour: str, height: float) -> None:
    """Draws a triangle at each ``x``, for values beyond the axis; ``height`` is a share of the panel's."""
    if len(x):
        heights = np.full(len(x), height)
        axes.plot(x, heights, "^", color=colour, transform=axes.get_xaxis_transform(), zorder=4)


def positive(values: Iterable[float]) -> np.ndarray:
    """Returns the values that a log axis can show: finite values above 0."""
    array = np.array(list(values), dtype=float)
    return array[np.isfinite(array) & (array > 0)]


def bars(comparisons: Sequence[Comparison], fill: Fill, inches: float = 0.5, many: float = 0.3) -> Figure | None:
    """Returns a figure with a panel for each comparison, the first run at the top; None where no run finished.

    Args:
        fill: draws the bars of a panel's runs, the n-th of which is at height n.
        inches: height of a run.
        many: height of a run where there are more than MANY runs.
    """
    every = [comparison.finished for comparison in comparisons]
    most = max(map(len, every), default=0)

    def draw(part: SubFigure, entries: Sequence[Entry]) -> None:
        axes = part.subplots()
        fill(axes, entries)
        axes.set_yticks(range(len(entries)), [entry.label for entry in entries])
        axes.set_ylim(most - 0.4, -0.6)  # inverted; the same bar height in every panel
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)

    figure = parts_of(comparisons, every, draw, 1.3 + (inches if most <= MANY else many) * most)
    if figure:
        _widen(figure)
    return figure


def _widen(figure: Figure) -> None:
    """Leaves room for the texts next to bars, and makes the figure as wide as that takes."""
    names, texts, label = (
        max(text.get_window_extent().width / figure.dpi + 0.15 for axes in figure.axes for text in of(axes))
        for of in (Axes.get_yticklabels, lambda axes: axes.texts, lambda axes: [axes.xaxis.label])
    )
    panel = max(WIDTH - names - AROUND, texts + BAR, label)
    figure.set_figwidth((panel + names + AROUND) * round(figure.get_figwidth() / WIDTH))
    for axes in figure.axes:
        axes.set_xlim(0, axes.dataLim.xmax * panel / (panel - texts))


def beside(axes: Axes, x: float, y: float, text: str) -> None:
    """Writes ``text`` to the right of a bar that ends at ``x``."""
    axes.annotate(text, (x, y), (6, 0), textcoords="offset points", va="center", fontsize=8)


def one_legend(figure: Figure, order: Sequence[str], ncols: int) -> None:
    """Draws one legend for all panels below them; labels that ``order`` does not name come last."""
    pairs = [pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in pairs}
    labels = sorted(handles, key=lambda label: order.index(label) if label in order else len(order))
    legend = [handles[label] for label in labels]
    figure.legend(legend, labels, loc="outside lower center", ncols=min(ncols, len(labels)), fontsize=8)
