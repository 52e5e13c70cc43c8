"""Exponents of activations, gradients and updates as figures: what fp16 and bf16 hold of them. From records only."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mpcompare.report.comparison import Comparison
from mpcompare.report.figures.judged import Judged
from mpcompare.report.figures.kit import COLOURS, DASHES, WIDTH, grid, nothing
from mpcompare.verdict.reading import HIGHEST, LOWEST

CURVES = 7  # as many as there are colours
EXPONENTS = np.arange(LOWEST, HIGHEST + 1)
# Of fp16, log2: below the first a number rounds to 0, below the second it is subnormal, from the third on it is inf.
ZERO, SUBNORMAL, INFINITE = -25.0, -14.0, 16.0
# Unit roundoff u, log2. Half the gap beside a normal weight w is between u |w| / 2 and u |w|, and an update below it is
# lost: what lies below u is the most that can be, for of what lies between u / 2 and u only a part is.
ROUNDOFF = {"fp32": -24.0, "fp16": -11.0, "bf16": -8.0}
Counts = Mapping[str, Sequence[int]]  # by layer or parameter: numerics.exponents
Exponents = Mapping[str, Counts]  # by step, "first" and "last"
PANELS = ("activations", "gradients of activations", "gradients of weights")  # groups of numerics.json
NAME = 20  # characters of a name in a table


def seen(runs: Sequence[Judged]) -> Judged | None:
    """The run whose exponents are drawn: they are the task's more than the run's, so of several one that scaled."""
    counted = [run for run in runs if run.numerics.get("exponents", {}).get("first")]
    return next((run for run in counted if first_scale(run) != 1), next(iter(counted), None))


def first_scale(run: Judged) -> float:
    """The loss scale of the first step, of the try whose gradients were finite where there was one."""
    steps = run.numerics.get("first", {}).get("steps", [])
    scale = next((step["loss_scale"] for step in steps if step["finite"]), steps[0]["loss_scale"] if steps else 1.0)
    return scale if 0 < scale < math.inf else 1.0


def below(counts: Sequence[int], low: float, high: float) -> float:
    """Which part of the values that are not 0 lies in ``[2^low, 2^high)``; NaN if all are 0. Limits that are no
    integers, of a loss scale that is no power of two, take in the bins whose middle they do."""
    values = np.array(counts[1:], dtype=float)
    middle = EXPONENTS + 0.5
    return float(values[(low < middle) & (middle < high)].sum() / values.sum()) if values.sum() else math.nan


def lost_in_fp16(counts: Sequence[int], scale: float = 1.0) -> tuple[float, float]:
    """Which part of the values that are not 0, times ``scale``, fp16 rounds to 0, and which are subnormal in it."""
    shift = math.log2(scale)
    return below(counts, -math.inf, ZERO - shift), below(counts, ZERO - shift, SUBNORMAL - shift)


def percent(part: float) -> str:
    """Exactly 0 and exactly 100 % are told from what rounds to them."""
    if math.isnan(part) or part in (0, 1):
        return "-" if math.isnan(part) else f"{100 * part:.0f}"
    return "<0.1" if part < 0.0005 else ">99.9" if part > 0.9995 else f"{100 * part:.1f}"


def exponents(comparisons: Sequence[Comparison], judged: Sequence[Sequence[Judged]]) -> Figure:
    """As figure 3 of Micikevicius et al., Mixed Precision Training (2018): what fp16 can hold above, below it
    histograms of activations and gradients, and beside these which part of them it loses."""
    figure, parts = grid(comparisons, 8.6, 1.75 * WIDTH)
    for part, runs in zip(parts, judged, strict=True):
        run = seen(runs)
        if run is None:
            nothing(part.subplots(), "no run counted exponents")
            continue
        scale, groups = first_scale(run), {title: _of_group(run, title) for title in PANELS}
        strip, *panels = part.subplots(4, 1, sharex=True, height_ratios=(0.8, 3, 3, 3))
        chosen = {title: choose(_named(run, counts["first"])) for title, counts in groups.items()}
        drawn = [_only(counts, chosen[title][0]) for title, counts in groups.items()]
        low, high = _range(drawn, ZERO - math.log2(scale), INFINITE)
        _formats(strip, scale, low, high)
        strip.set_title(_source(run), fontsize=9, loc="left")
        for axes, (title, counts) in zip(panels, groups.items(), strict=True):
            used = 1.0 if title == "activations" else scale
            names, left_out = chosen[title]
            axes.axvspan(low, ZERO, color="0.84", zorder=0, linewidth=0)
            axes.axvspan(ZERO, SUBNORMAL, color="0.93", zorder=0, linewidth=0)
            axes.axvline(INFINITE, color="0.7", linewidth=1)
            if used != 1:
                _moved_limits(axes, used)
            _histograms(axes, names, counts, low, high)
            _table(axes, *_losses(names, counts["first"], used), left_out)
            axes.set_title(title, fontsize=9, loc="left")
        panels[-1].set_xlabel("|value|   (at the left: exactly 0)")
    return figure


def _source(run: Judged) -> str:
    last = "; thin: after training, in fp32" if run.numerics["exponents"].get("last") else ""
    twin = " of the smooth twin" if run.numerics.get("twin") else ""
    return f"first step{twin}, in float64 from the weights of {run.entry.label}{last}"


def _of_group(run: Judged, group: str) -> Exponents:
    return {when: found.get(group, {}) for when, found in run.numerics["exponents"].items()}


def _named(run: Judged, counts: Counts) -> list[list[str]]:
    """What has any value: layers or weights, and biases, which are the first to be left out."""
    layers = run.numerics.get("layers", {})
    groups: list[list[str]] = [[], []]
    for name, values in counts.items():
        if np.sum(values):
            groups[layers.get(name, {}).get("part", "").startswith("bias")].append(name)
    return groups


def choose(groups: Sequence[Sequence[str]]) -> tuple[list[str], list[str]]:
    """At most CURVES names, and those left out: the later groups whole, then evenly from the first."""
    names = [name for group in groups for name in group]
    if len(names) <= CURVES:
        return names, []
    first = groups[0]
    places = np.linspace(0, len(first) - 1, min(CURVES, len(first))).round().astype(int)
    chosen = [first[place] for place in places]
    return chosen, [name for name in names if name not in chosen]


def _only(counts: Exponents, names: Sequence[str]) -> Exponents:
    return {when: {name: found[name] for name in names if name in found} for when, found in counts.items()}


def _range(groups: Iterable[Exponents], lowest: float, highest: float) -> tuple[float, float]:
    """The exponents that are drawn: all that occur, and those of the limits."""
    counts = [c[1:] for found in groups for tensors in found.values() for c in tensors.values()]
    used = EXPONENTS[np.sum(counts, axis=0) > 0]
    return math.floor(min([lowest, *used])) - 2.0, float(max([highest, *used])) + 4


def _formats(axes: Axes, scale: float, low: float, high: float) -> None:
    """A row a format: which numbers it holds."""
    rows = {"fp16": 0.0}
    if scale != 1:
        rows[f"fp16, scaled by {_power(scale)}"] = math.log2(scale)
    for row, shift in enumerate(rows.values()):
        edges = np.clip([low, ZERO - shift, SUBNORMAL - shift, INFINITE - shift, high], low, high)
        words, greys = ("rounds to 0", "subnormal", "normal", "inf"), ("0.75", "0.9", "white", "0.75")
        for left, right, word, grey in zip(edges, edges[1:], words, greys, strict=False):
            _segment(axes, row, left, right, word, grey)
    bf16 = r"normal: from $2^{-126}$ to $2^{128}$, as fp32's"
    _segment(axes, len(rows), low, high, bf16, "white")
    axes.set_yticks(range(len(rows) + 1), [*rows, "bf16"], fontsize=8)
    axes.set_ylim(len(rows) + 0.5, -0.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _moved_limits(axes: Axes, scale: float) -> None:
    """Of fp16, where a loss scale moves them among the gradients without it."""
    shift = math.log2(scale)
    for limit in (ZERO, SUBNORMAL, INFINITE):
        axes.axvline(limit - shift, color="black", linestyle="--", linewidth=0.8)
    axes.annotate("", (SUBNORMAL - shift, 300), (SUBNORMAL, 300), arrowprops={"arrowstyle": "->"})
    axes.text(
        SUBNORMAL,
        300,
        f" with the loss scale {_power(scale)}",
        va="center",
        fontsize=8,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )


def _segment(axes: Axes, row: int, left: float, right: float, word: str, grey: str) -> None:
    axes.barh(row, right - left, 0.8, left=left, color=grey, edgecolor="0.3", linewidth=0.6)
    if right - left >= 0.9 * len(word) or word.startswith("normal:"):
        axes.text((left + right) / 2, row, word, ha="center", va="center", fontsize=7.5)


def _power(scale: float) -> str:
    exponent = math.log2(scale)
    return f"$2^{{{exponent:.0f}}}$" if exponent.is_integer() else f"{scale:g}"


def _histograms(axes: Axes, names: Sequence[str], counts: Exponents, low: float, high: float) -> None:
    """Shares of all values, zeros included: those at the left, away from the others."""
    zero = low - 5
    for place, name in enumerate(names):
        x, first, last = zero - 1.5 + 3 * (place + 0.5) / len(names), counts["first"][name], counts.get("last", {})
        if name in last and np.sum(last[name]) and list(last[name]) != list(first):
            _histogram(axes, last[name], x, place, linewidth=0.7, alpha=0.8, markerfacecolor="white")
        _histogram(axes, first, x, place, name, linewidth=1.8, linestyle=DASHES[place])
    axes.axvline(low, color="0.3", linewidth=0.8)
    ticks = range(10 * math.ceil(low / 10), int(high) + 1, 10)
    axes.set_xticks([zero, *ticks], ["0", *(f"$2^{{{tick}}}$" for tick in ticks)])
    axes.set_xlim(low - 8, high)
    axes.set_yscale("log")
    axes.set_ylim(1e-3, 1000)
    axes.set_yticks([0.001, 0.01, 0.1, 1, 10, 100], ["0.001", "0.01", "0.1", "1", "10", "100"])
    axes.set_ylabel("% of the values")
    axes.grid(axis="y", alpha=0.3)


def _histogram(
    axes: Axes,
    counts: Sequence[int],
    x: float,
    place: int,
    label: str | None = None,
    markerfacecolor: str | None = None,
    **style: Any,
) -> None:
    """The share of zeros as a point at ``x``, the others as steps, down to the axis where there are none."""
    percents = 100 * np.array(counts, dtype=float) / np.sum(counts)
    steps = np.where(percents[1:] > 0, percents[1:], 1e-9)
    axes.stairs(steps, np.append(EXPONENTS, HIGHEST + 1), baseline=None, color=COLOURS[place], label=label, **style)
    if percents[0]:
        axes.plot(x, percents[0], "o", color=COLOURS[place], markersize=5, markerfacecolor=markerfacecolor)


def short(name: str) -> str:
    """Its end, if it is long."""
    return name if len(name) <= NAME else "..." + name[3 - NAME :]


def _column(names: Iterable[str]) -> int:
    """The width of the names in a table."""
    return max([8, *(len(short(name)) + 1 for name in names)])


def _losses(names: Sequence[str], counts: Counts, scale: float) -> tuple[str, list[str]]:
    """The head and the rows of the table: what fp16 loses of each tensor, without and with the scale."""
    scales = [1.0, scale] if scale != 1 else [1.0]
    words = ["in fp16", f"in fp16 x 2^{math.log2(scale):.4g}"]
    width = _column(names)
    head = "% of what is not 0\n" + " " * width + "".join(f"  {word:^16}" for word in words[: len(scales)])
    head += "\n" + " " * width + f"{'to 0':>7}{'subnormal':>11}" * len(scales)
    rows = []
    for name in names:
        lost = [lost_in_fp16(counts[name], s) for s in scales]
        parts = "".join(f"{percent(zero):>7}{percent(subnormal):>11}" for zero, subnormal in lost)
        rows.append(short(name).ljust(width) + parts)
    return head, rows


def _table(axes: Axes, head: str, rows: Sequence[str], left_out: Sequence[str]) -> None:
    """The legend as a table, beside the panel."""
    head = "\n".join(" " * 5 + line for line in head.splitlines())  # as wide as the line before each row
    handles = axes.get_legend_handles_labels()[0]
    legend = axes.legend(
        handles,
        rows[: len(handles)],
        title=head,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        alignment="left",
        prop={"family": "monospace", "size": 7},
        title_fontproperties={"family": "monospace", "size": 7},
        handlelength=2.2,
        handletextpad=0.8,
        borderpad=0,
    )
    legend.set_in_layout(True)
    if left_out:
        names = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
        axes.set_title(f"not drawn ({len(left_out)}): {names}", fontsize=7, loc="right")


def update_ratio(comparisons: Sequence[Comparison], judged: Sequence[Sequence[Judged]]) -> Figure:
    """Updates relative to their weights, beside the smallest that a format can add."""
    figure, parts = grid(comparisons, 3.6, 1.75 * WIDTH)
    for part, runs in zip(parts, judged, strict=True):
        axes, run = part.subplots(), seen(runs)
        if run is None:
            nothing(axes, "no run counted exponents")
            continue
        counts = _of_group(run, "updates")
        names, left_out = choose(_named(run, counts["first"]))
        low, high = _range([_only(counts, names)], min(ROUNDOFF.values()), 0.0)
        axes.axvspan(low, ROUNDOFF["fp16"], color="0.93", zorder=0, linewidth=0)
        for precision, limit in ROUNDOFF.items():
            axes.axvline(limit, color="black", linestyle="--", linewidth=0.8)
            side = {"fp16": "right", "bf16": "left"}.get(precision, "center")
            axes.annotate(f"{precision}: $2^{{{limit:.0f}}}$", (limit, 1), (0, 3), xycoords=axes.get_xaxis_transform(),
                          textcoords="offset points", ha=side, fontsize=8)  # fmt: skip
        _histograms(axes, names, counts, low, high)
        _table(axes, *_lost_updates(names, counts["first"]), left_out)
        axes.set_title(_source(run), fontsize=9, loc="left", pad=16)
        axes.set_xlabel("lr |gradient| / |weight|   (at the left: gradient exactly 0)\n"
                        "an update below half the gap beside its weight is lost: at most those left of the line",
                        fontsize=9)  # fmt: skip
    return figure


def lost_updates(counts: Sequence[int]) -> dict[str, float]:
    """Which part of the updates that are not 0 is lost in weights of a precision, at most."""
    return {precision: below(counts, -math.inf, limit) for precision, limit in ROUNDOFF.items()}


def _lost_updates(names: Sequence[str], counts: Counts) -> tuple[str, list[str]]:
    width = _column(names)
    precisions = "".join(f"{precision:>9}" for precision in ROUNDOFF)
    head = "% of what is not 0: lost (at most) in\n" + " " * width + precisions
    rows = [
        short(name).ljust(width) + "".join(f"{percent(lost):>9}" for lost in lost_updates(counts[name]).values())
        for name in names
    ]
    return head, rows
