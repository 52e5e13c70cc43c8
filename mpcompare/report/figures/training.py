"""What happened in the training steps as a figure: rate, loss scale, norm of the gradients, and what was lost of them.

A panel each, with one axis of steps for all. What no run has is left out: a rate that never changes, a scale that is
always 1, a norm where no task clips and nothing was monitored, a share that is 0 throughout, of which a line says so.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from mpcompare.report.comparison import Comparison, Entry
from mpcompare.report.figures.kit import COLOURS, finished, grid, line, nothing, save

SHARES = {
    "grad_zero": "gradients that\nare 0 in %",
    "grad_subnormal": "gradients that are\nsubnormal in %",
    "grad_nonfinite": "gradients that are\ninf or NaN in %",
    "lost_updates": "updates that\nare lost in %",
}
Placed = tuple[int, Entry]  # a finished run and its place, which has the same colour in every figure


def draw(comparisons: Sequence[Comparison], out: Path) -> None:
    """Writes ``training.png`` into ``out`` if any run has something to show."""
    drawn = [comparison for comparison in comparisons if finished(comparison)]
    if any(map(_panels, drawn)):
        save(training(drawn), out / "training.png")


def training(comparisons: Sequence[Comparison]) -> Figure:
    """A part for each comparison, with the panels that it has something for."""
    panels = [_panels(comparison) for comparison in comparisons]
    most = max(map(len, panels))
    figure, parts = grid(comparisons, 1.2 + 1.7 * most)
    for part, comparison, mine in zip(parts, comparisons, panels, strict=True):
        entries = list(enumerate(finished(comparison)))
        if not mine:
            nothing(part.subplots(), "nothing to show: rate and scale never change, and nothing was monitored")
            continue
        rows = part.subplots(most, 1, sharex=True, squeeze=False)[:, 0]  # all panels of the figure are of one height
        for axes, panel in zip(rows, mine, strict=False):
            panel(axes, entries)
            axes.grid(alpha=0.3)
        for axes in rows[len(mine) :]:
            axes.set_axis_off()
        warmup = int(_column(entries[0][1], "warmup").sum())
        for axes in rows[: len(mine)]:
            axes.axvspan(0.5, warmup + 0.5, color="0.92", zorder=0, visible=warmup > 0)
            axes.tick_params(labelbottom=axes is rows[len(mine) - 1])
        last = rows[len(mine) - 1]
        last.set_xlabel("step" + _notes(entries))
        last.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        runs = [Line2D([], [], label=entry.label, **line(place)) for place, entry in entries]
        part.legend(handles=runs, loc="outside lower center", ncols=min(3, len(runs)), fontsize=8)
    return figure


def _column(entry: Entry, name: str) -> pd.Series:
    """Of ``steps.csv``, by step; all NaN where there is none."""
    steps = entry.run.steps
    values = steps[name].to_numpy(dtype=float) if name in steps else np.full(len(steps), np.nan)
    return pd.Series(values, index=steps["step"].to_numpy())


def _panels(comparison: Comparison) -> list[Callable[[Axes, Sequence[Placed]], None]]:
    entries = finished(comparison)
    found: list[Callable[[Axes, Sequence[Placed]], None]] = []
    if any(_column(entry, "lr").nunique() > 1 for entry in entries):
        found.append(_rate)
    if any(scales(entry) for entry in entries):
        found.append(_scale)
    if any(_column(entry, "grad_norm").notna().any() for entry in entries):
        found.append(_norm)
    for name in SHARES:
        if any((_column(entry, name) > 0).any() for entry in entries):
            found.append(_share(name))
    return found


def scales(entry: Entry) -> bool:
    """Whether the loss was scaled in any step."""
    return bool((_column(entry, "loss_scale") != 1).any())


def _notes(entries: Sequence[Placed]) -> str:
    """What the marks mean, and which shares are always 0."""
    notes = ["grey: warm-up"] if _column(entries[0][1], "warmup").any() else []
    if any(_column(entry, "skipped").any() for _, entry in entries):
        notes.append("x: skipped")
    if any(np.isinf(_column(entry, "grad_norm")).any() for _, entry in entries):
        notes.append("triangle: inf")
    never = [
        label.replace("\n", " ").removesuffix(" in %")
        for name, label in SHARES.items()
        if len(shares := pd.concat([_column(entry, name).dropna() for _, entry in entries])) and (shares == 0).all()
    ]
    said = f"   ({'; '.join(notes)})" if notes else ""
    return said + (f"\nno {', no '.join(never)}" if never else "")


def _rate(axes: Axes, entries: Sequence[Placed]) -> None:
    for place, entry in entries:
        rate = _column(entry, "lr").dropna()
        axes.step(rate.index, rate, where="mid", **line(place))
    axes.set_ylabel("learning rate")
    axes.set_ylim(bottom=0)


def _scale(axes: Axes, entries: Sequence[Placed]) -> None:
    """Of the runs that scale, skipped steps marked."""
    scaled = [(place, entry) for place, entry in entries if scales(entry)]
    for place, entry in scaled:
        scale = _column(entry, "loss_scale")
        axes.step(scale.index, scale, where="mid", label=entry.label, **line(place))
        skipped = scale[_column(entry, "skipped") != 0]
        axes.plot(skipped.index, skipped, "x", color=COLOURS[place % 7], markersize=max(13 - 3 * place, 5))
    axes.set_yscale("log", base=2)
    _fit(axes, [_column(entry, "loss_scale") for _, entry in scaled])
    axes.set_ylabel("loss scale")


def _norm(axes: Axes, entries: Sequence[Placed]) -> None:
    """Before clipping, in the steps that have one; and what it is clipped to."""
    for place, entry in entries:
        norm = _column(entry, "grad_norm").dropna()
        finite = norm[np.isfinite(norm) & (norm > 0)]
        axes.plot(finite.index, finite, **_points(place, entry, norm))
        _at_the_top(axes, norm.index[~np.isfinite(norm)], place)
    limits = {entry.run.result["config"]["task"].get("clip_norm") for _, entry in entries} - {None}
    for limit in limits:
        axes.axhline(limit, color="0.2", linestyle="--", linewidth=1.2)
        axes.annotate("clipped to", (1, limit), (-4, 3), xycoords=axes.get_yaxis_transform(), fontsize=8,
                      textcoords="offset points", ha="right")  # fmt: skip
    axes.set_yscale("log")
    _fit(axes, [_column(entry, "grad_norm") for _, entry in entries], *limits)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("norm of the\ngradients")


def _share(name: str) -> Callable[[Axes, Sequence[Placed]], None]:
    def panel(axes: Axes, entries: Sequence[Placed]) -> None:
        columns = [100 * _column(entry, name).dropna() for _, entry in entries]
        for (place, entry), percents in zip(entries, columns, strict=True):
            axes.plot(percents.index, percents, **_points(place, entry, percents))
        if name != "grad_zero":  # which relu makes many of: only there differences matter more than orders
            _decades(axes, pd.concat(columns))
        axes.set_ylabel(SHARES[name])

    return panel


def _decades(axes: Axes, percents: pd.Series) -> None:
    """An axis of decades from 0 on, which is linear below the smallest share that there is."""
    positive = percents[percents > 0]
    low, high = math.floor(math.log10(positive.min())), math.ceil(math.log10(positive.max()))
    high = max(high, low + 1)
    axes.set_yscale("symlog", linthresh=10.0**low, linscale=0.4)
    axes.set_ylim(-(10.0**low) / 4, 1.5 * 10.0**high)
    ticks = [0.0, *(10.0**power for power in range(low, high + 1, math.ceil((high - low) / 4)))]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks([], minor=True)


def _points(place: int, entry: Entry, values: pd.Series) -> dict[str, Any]:
    """The style of a line; with marks where only some steps have a value."""
    sparse = len(values) < len(entry.run.steps)
    return {**line(place), "marker": "o" if sparse else None, "markersize": 4, "label": entry.label}


def _at_the_top(axes: Axes, steps: Any, place: int) -> None:
    """Marks what has no place on the axis."""
    if len(steps):
        heights = np.full(len(steps), 0.95)
        axes.plot(steps, heights, "^", color=COLOURS[place % 7], transform=axes.get_xaxis_transform(), zorder=4)


def _fit(axes: Axes, columns: Sequence[pd.Series], *more: float) -> None:
    """A log axis around what it can show."""
    values = np.array([value for column in columns for value in column] + list(more))
    if len(values := values[np.isfinite(values) & (values > 0)]):
        axes.set_ylim(values.min() / 2, values.max() * 2)
