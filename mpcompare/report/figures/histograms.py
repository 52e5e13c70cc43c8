"""Histograms of exponents, and next to them a table with a row for each tensor: the kit of two figures."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from mpcompare.report.figures.judged import Exponents, Judged
from mpcompare.report.figures.kit import COLOURS, DASHES
from mpcompare.report.figures.texts import power
from mpcompare.verdict.findings import HIGHEST, LOWEST

CURVES = 7  # as many as there are colours
EXPONENTS = np.arange(LOWEST, HIGHEST + 1)
NAME = 20  # characters of a name in a table; more where so few do not tell names apart


def counted(runs: Sequence[Judged]) -> Judged | None:
    """Returns the run whose exponents are drawn: exponents depend on the task more than on the run. Of several runs it
    is one that scaled its loss."""
    counting = [run for run in runs if run.counts_exponents()]
    return next((run for run in counting if run.first_scale != 1), next(iter(counting), None))


def source(run: Judged) -> str:
    """Returns the title of a panel: when and of which run exponents were counted."""
    last = "; thin: after training, in fp32" if run.counts_exponents("last") else ""
    return f"first step, in float64 from the weights of {run.entry.label}{last}"


def share(counts: Sequence[int], low: float, high: float) -> float:
    """Returns the share of the nonzero values that lies in ``[2^low, 2^high)``; NaN if all are 0.

    Limits are no integers if a loss scale is no power of two. A bin is then within the limits if its middle is.
    """
    values = np.array(counts[1:], dtype=float)
    middle = EXPONENTS + 0.5
    return float(values[(low < middle) & (middle < high)].sum() / values.sum()) if values.sum() else math.nan


def percent(part: float) -> str:
    """Returns a share in percent; exactly 0 and exactly 100 % are told from shares that round to them."""
    if math.isnan(part) or part in (0, 1):
        return "-" if math.isnan(part) else f"{100 * part:.0f}"
    return "<0.1" if part < 0.0005 else ">99.9" if part > 0.9995 else f"{100 * part:.1f}"


def chosen(run: Judged, group: str) -> tuple[Exponents, list[str]]:
    """Returns the counts of a group that are drawn, and the names of the tensors that are left out. Tensors without
    values are not drawn; of the others, biases are the first to be left out."""
    counts = run.exponents(group)
    kinds: list[list[str]] = [[], []]  # layers or weights, and biases
    for name, values in counts["first"].items():
        if np.sum(values):
            kinds[run.is_bias(name)].append(name)
    names, left_out = choose(kinds)
    return {when: {name: of[name] for name in names if name in of} for when, of in counts.items()}, left_out


def choose(groups: Sequence[Sequence[str]]) -> tuple[list[str], list[str]]:
    """Returns at most CURVES names, and the names left out: the later groups whole, then evenly from the first."""
    names = [name for group in groups for name in group]
    if len(names) <= CURVES:
        return names, []
    first = groups[0]
    places = np.linspace(0, len(first) - 1, min(CURVES, len(first))).round().astype(int)
    chosen = [first[place] for place in places]
    return chosen, [name for name in names if name not in chosen]


def ends(groups: Iterable[Exponents], lowest: float, highest: float) -> tuple[float, float]:
    """Returns the lowest and the highest exponent that are drawn, so that all that occur and the limits are seen."""
    counts = [c[1:] for group in groups for tensors in group.values() for c in tensors.values()]
    used = EXPONENTS[np.sum(counts, axis=0) > 0]
    return math.floor(min([lowest, *used])) - 2.0, float(max([highest, *used])) + 4


def draw(axes: Axes, counts: Exponents, low: float, high: float) -> None:
    """Draws shares of all values, zeros included: the zeros are at the left, away from the others."""
    zero, last = low - 5, counts.get("last", {})
    for place, (name, first) in enumerate(counts["first"].items()):
        x = zero - 1.5 + 3 * (place + 0.5) / len(counts["first"])
        if name in last and np.sum(last[name]) and list(last[name]) != list(first):
            _histogram(axes, last[name], x, place, fill="white", linewidth=0.7, alpha=0.8)
        _histogram(axes, first, x, place, linewidth=1.8, linestyle=DASHES[place], label=name)
    axes.axvline(low, color="0.3", linewidth=0.8)
    ticks = range(10 * math.ceil(low / 10), int(high) + 1, 10)
    axes.set_xticks([zero, *ticks], ["0", *(power(2, tick) for tick in ticks)])
    axes.set_xlim(low - 8, high)
    axes.set_yscale("log")
    axes.set_ylim(1e-3, 1000)
    axes.set_yticks([0.001, 0.01, 0.1, 1, 10, 100], ["0.001", "0.01", "0.1", "1", "10", "100"])
    axes.set_ylabel("% of the values")
    axes.grid(axis="y", alpha=0.3)


def _histogram(axes: Axes, counts: Sequence[int], x: float, place: int, fill: str | None = None, **style: Any) -> None:
    """The share of zeros as a point at ``x``, the others as steps, down to the axis where there are none."""
    percents = 100 * np.array(counts, dtype=float) / np.sum(counts)
    steps = np.where(percents[1:] > 0, percents[1:], 1e-9)
    axes.stairs(steps, np.append(EXPONENTS, HIGHEST + 1), baseline=None, color=COLOURS[place], **style)
    if percents[0]:
        axes.plot(x, percents[0], "o", color=COLOURS[place], markersize=5, markerfacecolor=fill)


def short(names: Sequence[str]) -> tuple[int, list[str]]:
    """Returns the width of the column of names, and the names padded to it. Of a long name the end stays, as long as it
    takes to tell names apart."""
    size = NAME
    while len(set(ends := [_end(name, size) for name in names])) < len(set(names)):
        size += 1
    width = max([8, *(len(end) + 1 for end in ends)])
    return width, [end.ljust(width) for end in ends]


def _end(name: str, size: int) -> str:
    """The last parts of a name, as many as ``size`` characters hold; of a longer part its end."""
    if len(name) <= size:
        return name
    tail = name[3 - size :]
    return "..." + (tail.partition(".")[2] or tail)


def table(axes: Axes, title: str, heads: Sequence[str], rows: Mapping[str, str], left_out: Sequence[str]) -> None:
    """Draws the legend as a table next to the panel, a row a histogram: its name, and the cells of that name in
    ``rows``. The ``heads`` stand above the cells."""
    width, names = short(list(rows))
    lines = [title, *(" " * width + head for head in heads)]
    handles = axes.get_legend_handles_labels()[0]
    head = "\n".join(" " * 5 + line for line in lines)  # as wide as the line before each row
    labels = [name + cells for name, cells in zip(names, rows.values(), strict=True)][: len(handles)]
    font = {"family": "monospace", "size": 7}
    axes.legend(handles, labels, title=head, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False,
                alignment="left", prop=font, title_fontproperties=font, handlelength=2.2, handletextpad=0.8,
                borderpad=0)  # fmt: skip
    if left_out:
        some = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
        axes.set_title(f"not drawn ({len(left_out)}): {some}", fontsize=7, loc="right")
