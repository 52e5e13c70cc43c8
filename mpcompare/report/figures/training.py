"""The figure of the training steps: rate, loss scale, norm of the gradients, and the shares of them that were lost.

Each has a panel, with one axis of steps for all. A panel in which no run has anything to show is left out: a rate that
never changes, a scale that is always 1, a norm where no task clips and nothing was monitored, a share that is always 0.
A line names the shares that are always 0.
"""

import math
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from mpcompare.report.comparison import Entry
from mpcompare.report.contents import Report
from mpcompare.report.figures import kit

SHARES = {
    "grad_zero": "gradients that\nare 0 in %",
    "grad_subnormal": "gradients that are\nsubnormal in %",
    "grad_nonfinite": "gradients that are\ninf or NaN in %",
    "lost_updates": "updates that\nare lost in %",
}
LETTERS = 70  # characters in a line below the panels
Panel = Callable[[Axes, Sequence[Entry]], None]  # draws all finished runs: the place of a run has a colour


def training(report: Report) -> Figure | None:
    """Draws a part for each comparison, with the panels that it has something for; None where none has any."""
    runs = [comparison.finished for comparison in report.finished]
    panels = [*map(_panels, runs)]
    most = max(map(len, panels), default=0)
    drawn = [(own, entries) if own else None for own, entries in zip(panels, runs, strict=True)]
    missing = "nothing to show: rate and scale never change, and nothing was monitored"
    height = 1.2 + 1.7 * most + max((kit.more_rows([entry.label for entry in entries]) for entries in runs), default=0)
    return kit.parts_of(report.finished, drawn, partial(_draw, most=most), height, missing=missing)


def _draw(part: SubFigure, drawn: tuple[Sequence[Panel], Sequence[Entry]], most: int) -> None:
    """Draws the panels into the first of ``most`` rows, which are of one height in all parts; the others stay empty."""
    panels, entries = drawn
    rows = part.subplots(most, 1, sharex=True, squeeze=False)[:, 0]
    used, last = rows[: len(panels)], rows[len(panels) - 1]
    for axes, panel in zip(used, panels, strict=True):
        panel(axes, entries)
        axes.grid(alpha=0.3)
        axes.tick_params(labelbottom=axes is last)
    for axes in rows[len(panels) :]:
        axes.set_axis_off()
    shaded = kit.shade_warmup(used, entries)
    last.set_xlabel("step" + _notes(entries, shaded))
    last.xaxis.set_major_locator(kit.whole_steps())
    runs = [Line2D([], [], label=entry.label, **kit.line(place)) for place, entry in enumerate(entries)]
    kit.legend(part, runs, [entry.label for entry in entries])


def _series(entry: Entry, name: str) -> pd.Series:
    """The values of a field of ``steps.csv``, by step; all NaN where there is none."""
    return entry.run.steps.set_index("step").reindex(columns=[name])[name].astype(float)


def _panels(entries: Sequence[Entry]) -> list[Panel]:
    shown: dict[Panel, bool] = {
        _rate: any(_series(entry, "lr").nunique() > 1 for entry in entries),
        _scale: any(map(scales, entries)),
        _norm: any(_series(entry, "grad_norm").notna().any() for entry in entries),
        **{partial(_share, name): any((_series(entry, name) > 0).any() for entry in entries) for name in SHARES},
    }
    return [panel for panel, has_something in shown.items() if has_something]


def scales(entry: Entry) -> bool:
    """Whether the loss was scaled in any step."""
    return bool((_series(entry, "loss_scale") != 1).any())


def _notes(entries: Sequence[Entry], shaded: bool) -> str:
    """The meaning of the marks, and the shares that are always 0."""
    notes = ["grey: warm-up"] if shaded else []
    if any(_series(entry, "skipped").any() for entry in entries):
        notes.append("x: skipped")
    if any(np.isinf(_series(entry, "grad_norm")).any() for entry in entries):
        notes.append("triangle: inf")
    never = [
        label.replace("\n", " ").removesuffix(" in %")
        for name, label in SHARES.items()
        if len(shares := pd.concat([_series(entry, name).dropna() for entry in entries])) and (shares == 0).all()
    ]
    meanings = f"   ({'; '.join(notes)})" if notes else ""
    return "\n".join([meanings, *(textwrap.wrap(f"no {', no '.join(never)}", LETTERS) if never else ())])


def _rate(axes: Axes, entries: Sequence[Entry]) -> None:
    for place, entry in enumerate(entries):
        rate = _series(entry, "lr").dropna()
        kit.curve(axes, rate, drawstyle="steps-mid", **kit.line(place))
    axes.set_ylabel("learning rate")
    axes.set_ylim(bottom=0)


def _scale(axes: Axes, entries: Sequence[Entry]) -> None:
    """The loss scale of the runs that scale, skipped steps marked."""
    scaled = {place: _series(entry, "loss_scale") for place, entry in enumerate(entries) if scales(entry)}
    for place, scale in scaled.items():
        entry = entries[place]
        kit.curve(axes, scale, drawstyle="steps-mid", label=entry.label, **kit.line(place))
        skipped = scale[_series(entry, "skipped") != 0]
        axes.plot(skipped.index, skipped, "x", color=kit.colour(place), markersize=max(13 - 3 * place, 5))
    axes.set_yscale("log", base=2)
    _fit(axes, list(scaled.values()))
    axes.set_ylabel("loss scale")


def _norm(axes: Axes, entries: Sequence[Entry]) -> None:
    """The norm before clipping, in the steps that have one; and the norm to which gradients are clipped."""
    for place, entry in enumerate(entries):
        norm = _series(entry, "grad_norm").dropna()
        finite = norm[np.isfinite(norm) & (norm > 0)]
        kit.curve(axes, finite, **_points(place, entry, norm))
        kit.at_the_top(axes, norm.index[~np.isfinite(norm)], kit.colour(place), 0.95)
    limits = {entry.run.result.config["task"].get("clip_norm") for entry in entries} - {None}
    for limit in limits:
        axes.axhline(limit, color="0.2", linestyle="--", linewidth=1.2)
        axes.annotate("clipped to", (1, limit), (-4, 3), xycoords=axes.get_yaxis_transform(), fontsize=8,
                      textcoords="offset points", ha="right")  # fmt: skip
    axes.set_yscale("log")
    _fit(axes, [_series(entry, "grad_norm") for entry in entries], *limits)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("norm of the\ngradients")


def _share(name: str, axes: Axes, entries: Sequence[Entry]) -> None:
    percents = [100 * _series(entry, name).dropna() for entry in entries]
    for place, (entry, values) in enumerate(zip(entries, percents, strict=True)):
        kit.curve(axes, values, **_points(place, entry, values))
    if name != "grad_zero":  # relu makes many zeros: only there differences matter more than orders
        _decades(axes, pd.concat(percents))
    axes.set_ylabel(SHARES[name])


def _decades(axes: Axes, percents: pd.Series) -> None:
    """An axis of decades from 0 on, which is linear below the smallest share that there is."""
    shares = percents[percents > 0]
    low, high = math.floor(math.log10(shares.min())), math.ceil(math.log10(shares.max()))
    high = max(high, low + 1)
    axes.set_yscale("symlog", linthresh=10.0**low, linscale=0.4)
    axes.set_ylim(-(10.0**low) / 4, 1.5 * 10.0**high)
    ticks = [0.0, *(10.0**power for power in range(low, high + 1, math.ceil((high - low) / 4)))]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks([], minor=True)


def _points(place: int, entry: Entry, values: pd.Series) -> dict[str, Any]:
    """The style of a line; with marks where only some steps have a value."""
    sparse = len(values) < len(entry.run.steps)
    marks = {"marker": kit.marker(place), "markersize": 4, "markevery": 1} if sparse else {}
    return {**kit.line(place), **marks, "label": entry.label}


def _fit(axes: Axes, series: Sequence[pd.Series], *more: float) -> None:
    values = kit.positive([*(value for each in series for value in each), *more])
    if len(values):
        axes.set_ylim(values.min() / 2, values.max() * 2)
