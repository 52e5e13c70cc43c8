"""Panels of horizontal bars: one for each comparison, a row a run."""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mpcompare.report.comparison import Comparison, Entry
from mpcompare.report.figures.kit import grid

MANY = 8  # runs; of more each has less room
Fill = Callable[[Axes, Sequence[Entry]], None]


def bars(
    comparisons: Sequence[Comparison], fill: Fill, inches: float = 0.5, many: float = 0.3, room: float = 1.75
) -> Figure:
    """Returns a figure with a panel for each comparison, the first run at the top.

    Args:
        fill: draws the bars of a panel's runs, the n-th of which is at height n.
        inches: height of a run.
        many: the same where there are more than MANY runs.
        room: width of the panel, the longest bar being 1: the numbers stand beside the bars.
    """
    most = max(len(comparison.finished) for comparison in comparisons)
    figure, parts = grid(comparisons, 1.3 + (inches if most <= MANY else many) * most)
    for part, comparison in zip(parts, comparisons, strict=True):
        axes, entries = part.subplots(), comparison.finished
        fill(axes, entries)
        axes.set_yticks(range(len(entries)), [entry.label for entry in entries])
        axes.set_ylim(most - 0.4, -0.6)  # inverted; the same bar height in every panel
        axes.set_xlim(0, room * axes.dataLim.xmax)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    return figure


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
