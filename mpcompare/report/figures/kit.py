"""The comparison as figures: loss, step time, phases, memory. A part for each comparison, one colour a run."""

import logging
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from mpcompare.phases import WHOLE_STEP
from mpcompare.records import Run, write_atomically
from mpcompare.report.columns import percent
from mpcompare.report.comparison import Comparison, Entry, phases_of, steps_of_both

# Okabe and Ito's palette: told apart by colour-blind readers; lines differ in their dashes too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (9, 3)), (0, (3, 1, 1, 1, 1, 1)), (0, (2, 4)))
# The kinds of the memory model, in its order; black and the hatched greys are left to what is measured.
KIND_COLOURS = {
    "inputs": "#56B4E9",
    "master params": "#0072B2",
    "optimizer state": "#009E73",
    "compute copies": "#CC79A7",
    "cast cache": "#D55E00",
    "activations": "#E69F00",
    "gradients": "#F0E442",
    "workspace": "#BBBBBB",
}
PHASES = {
    "forward": "#56B4E9",
    "backward": "#E69F00",
    "unscale": "#F0E442",
    "step": "#009E73",
    "update": "#CC79A7",
    WHOLE_STEP: "#BBBBBB",
}
# Of operators, where no model tells the kinds: muted, so that nobody takes them for kinds.
OPERATOR_COLOURS = [colormaps["tab20b"](place) for place in (0, 6, 9, 13, 17, 2, 5, 10, 14, 18)]
OPERATORS, OTHERS = 5, "other operators"  # how many of a run are told apart, and the rest
WIDTH, LINE = 6.4, 0.16  # inches: a comparison, a line of its title
# Of the figure's measured rows; short, because a legend does not wrap.
ALLOCATED = "measured: allocator"
OUTSIDE = "measured: packing buffers"
RESIDENT = "measured: rise of RSS"
Piece = tuple[float, str, dict[str, Any]]  # of a stacked bar: width, label, style
logging.getLogger("matplotlib").setLevel(logging.WARNING)  # its first run announces a font cache


def draw(comparisons: Sequence[Comparison], out: Path) -> None:
    """Writes ``loss.png``, ``step_time.png``, ``phases.png`` and ``memory.png`` into ``out``; comparisons with no
    finished run are left out, and with none at all nothing is drawn."""
    drawn = [c for c in comparisons if finished(c)]
    if not drawn:
        return
    save(_loss(drawn), out / "loss.png")
    bars = max(len(finished(c)) for c in drawn)
    save(_bars(drawn, bars, _step_time), out / "step_time.png")
    save(_phases_figure(drawn, bars), out / "phases.png")
    save(_memory_figure(drawn, bars), out / "memory.png")


def finished(comparison: Comparison) -> list[Entry]:
    return [entry for entry in comparison.entries if entry.ok]


def line(place: int) -> dict[str, Any]:
    """The style of lines that may coincide: the later ones are thinner, so that none hides another."""
    return {"color": COLOURS[place % 7], "linestyle": DASHES[place % 7], "linewidth": max(2.6 - 0.5 * place, 1)}


def save(figure: Figure, path: Path) -> None:
    write_atomically(path, lambda unfinished: figure.savefig(unfinished, dpi=150))


def grid(comparisons: Sequence[Comparison], height: float, width: float = WIDTH) -> tuple[Figure, list[SubFigure]]:
    """A figure with a part for every comparison, with its title and ``height`` inches below that, three in a row."""
    rows = math.ceil(len(comparisons) / 3)
    columns = math.ceil(len(comparisons) / rows)
    texts = [(c.title, c.dataset, c.not_the_same) for c in comparisons]
    titles = [[line for text in paragraphs for line in textwrap.wrap(text, 84)] for paragraphs in texts]
    height += LINE * max(map(len, titles))
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    parts = list(figure.subfigures(rows, columns, squeeze=False).flat)[: len(comparisons)]
    for part, title in zip(parts, titles, strict=True):
        part.suptitle("\n".join(title), fontsize=9, x=0.02, ha="left")
    return figure, parts


def _loss(comparisons: Sequence[Comparison]) -> Figure:
    """Loss curves above, their difference to the baseline below on a log axis; warm-up shaded, skipped steps marked.
    What was evaluated in between stands beside them: held-out loss, and its accuracy in a panel of its own."""
    classes = any(_accuracies(comparison) for comparison in comparisons)
    figure, parts = grid(comparisons, 8.0 if classes else 6.1)
    for part, comparison in zip(parts, comparisons, strict=True):
        rows = part.subplots(3 if classes else 2, 1, sharex=True, height_ratios=(3, 2, 2)[: 3 if classes else 2])
        above, below = rows[0], rows[-1]
        if classes:
            _accuracy(rows[1], comparison)
        for place, entry in enumerate(finished(comparison)):
            steps = entry.run.steps
            style = {"color": COLOURS[place % 7], "linestyle": DASHES[place % 7]}
            above.plot(
                steps["step"],
                steps["loss"],
                label=entry.label + (" (baseline)" if entry.is_baseline else ""),
                **style,
                linewidth=5 if entry.is_baseline else max(2.6 - 0.5 * place, 1),
                alpha=0.45 if entry.is_baseline else 1,
                zorder=1 if entry.is_baseline else 2,
            )
            skipped = steps[steps["skipped"]]
            above.plot(skipped["step"], skipped["loss"], "x", color=style["color"], markersize=8)
            if len(evals := _evals(entry)):
                above.plot(evals["step"], evals["test_loss"], **_held_out(place))
            if not entry.is_baseline and entry.baseline and len(entry.loss_diff):
                # A log axis has no zero: equal losses leave a gap. A loss that is not finite is marked at the top.
                number = steps_of_both(entry.run, entry.baseline)
                difference = np.where(entry.loss_diff > 0, entry.loss_diff, np.nan)
                below.plot(number, difference, marker="o", markersize=3, **style)
                lost = number[~np.isfinite(entry.loss_diff)]
                below.plot(lost, np.ones(len(lost)), "^", color=style["color"], transform=below.get_xaxis_transform())
        each = [entry.run.steps for entry in finished(comparison)]
        warmup = max((number for steps in each for number in steps.loc[steps["warmup"], "step"]), default=0)
        evaluated = any(len(_evals(entry)) for entry in finished(comparison))
        if evaluated:
            above.plot([], [], label="held-out loss", **{**_held_out(0), "color": "0.3"})
        for axes in rows:
            axes.axvspan(0.5, warmup + 0.5, color="0.92", zorder=0, label="warm-up" if warmup else None)
            axes.grid(alpha=0.3)
        above.legend(fontsize=8)
        above.set_ylabel("training and held-out loss" if evaluated else "training loss")
        below.set_yscale("log")
        below.set_ylabel("|loss - baseline's|")
        below.set_xlabel("step   (gap: no difference; triangle: a loss is inf or NaN; x above: skipped)")
        below.xaxis.get_major_locator().set_params(integer=True)
        if not below.lines:
            below.text(0.5, 0.5, "nothing to compare with", transform=below.transAxes, ha="center", color="0.4")
    return figure


def _evals(entry: Entry) -> pd.DataFrame:
    """What was evaluated while the run trained, and after; no rows if only after, which is a number of the table."""
    evals = entry.run.evals
    return evals if len(evals) > 1 else evals[:0]


def _accuracies(comparison: Comparison) -> list[Entry]:
    return [entry for entry in finished(comparison) if _evals(entry)["test_accuracy"].notna().any()]


def _held_out(place: int) -> dict[str, Any]:
    """The style of what held-out samples gave: white squares, so that they are told from the training loss."""
    style = {"color": COLOURS[place % 7], "linestyle": DASHES[place % 7], "linewidth": 0.8}
    return {**style, "marker": "s", "markersize": max(7 - place, 3), "markerfacecolor": "white", "zorder": 3}


def _accuracy(axes: Axes, comparison: Comparison) -> None:
    """Held-out accuracy of each run that was evaluated in between."""
    if not _accuracies(comparison):
        axes.text(0.5, 0.5, "not evaluated in between", transform=axes.transAxes, ha="center", color="0.4")
    for place, entry in enumerate(finished(comparison)):
        if len(evals := _evals(entry)):
            axes.plot(evals["step"], evals["test_accuracy"], **_held_out(place))
    axes.set_ylabel("held-out accuracy")


def nothing(axes: Axes, why: str) -> None:
    """An empty panel that says why it is."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center", color="0.4")


def _bars(
    comparisons: Sequence[Comparison],
    bars: int,
    fill: Callable[[Axes, list[Entry]], None],
    inches: float = 0.5,
    room: float = 1.75,
) -> Figure:
    """A panel of horizontal bars a comparison, the first run at the top.

    Args:
        inches: how high each run is.
        room: how wide the panel is, the longest bar being 1: the numbers stand beside the bars.
    """
    figure, parts = grid(comparisons, 1.3 + inches * bars)
    for part, comparison in zip(parts, comparisons, strict=True):
        axes, entries = part.subplots(), finished(comparison)
        fill(axes, entries)
        axes.set_yticks(range(len(entries)), [entry.label for entry in entries])
        axes.set_ylim(bars - 0.4, -0.6)  # inverted; the same bar height in every panel
        axes.set_xlim(0, room * axes.dataLim.xmax)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    return figure


def _colours(entries: list[Entry]) -> list[str]:
    return [COLOURS[place % 7] for place in range(len(entries))]


def _step_time(axes: Axes, entries: list[Entry]) -> None:
    p20, p50, p80 = (np.array([e.run.result[f"step_ms_p{p}"] for e in entries]) for p in (20, 50, 80))
    axes.barh(range(len(entries)), p50, xerr=(p50 - p20, p80 - p50), color=_colours(entries), ecolor="0.2", capsize=4)
    for place, entry in enumerate(entries):
        side = "" if entry.side_by_side else ", not side by side"
        ratio = "baseline" if entry.is_baseline else f"x {entry.speedup}{side}"
        axes.annotate(
            f"{p50[place]:.4g} ms, {ratio}", (p80[place], place), (6, 0), textcoords="offset points", va="center"
        )
    axes.set_xlabel("ms a step: median, p20 to p80 of the blocks\nx: speed relative to the baseline (95 % interval)")


def _phases_figure(comparisons: Sequence[Comparison], bars: int) -> Figure:
    """A panel a comparison, and one legend for all below them."""
    figure = _bars(comparisons, bars, _phases, room=1.5)
    _one_legend(figure, list(PHASES), columns=6)
    return figure


def _one_legend(figure: Figure, order: Sequence[str], columns: int) -> None:
    """Of all panels below them, in this order; others after it."""
    pairs = [pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in pairs}
    labels = sorted(handles, key=lambda label: order.index(label) if label in order else len(order))
    legend = [handles[label] for label in labels]
    figure.legend(legend, labels, loc="outside lower center", ncols=min(columns, len(labels)), fontsize=8)


def _phases(axes: Axes, entries: list[Entry]) -> None:
    """A bar a run, of its phases from first to last."""
    phases = phases_of(entry.run for entry in entries)
    for place, entry in enumerate(entries):
        times = {phase: entry.run.result["phase_ms"].get(phase) or 0.0 for phase in phases}
        right = 0.0
        for phase, width in times.items():
            if phase not in entry.run.result["phase_ms"]:
                continue
            colour = PHASES.get(phase, "0.6")
            axes.barh(place, width, left=right, color=colour, edgecolor="white", linewidth=0.5, label=phase)
            if width > 0.12 * sum(times.values()):
                axes.text(right + width / 2, place, f"{width:.3g}", ha="center", va="center", fontsize=8)
            right += width
        clock = "" if times.get(WHOLE_STEP) else f" (clock {entry.run.result['phase_overhead']:+.1%})"
        _beside(axes, right, place, f"{right:.4g} ms{clock}")
    axes.set_xlabel("ms in each phase, with a clock between them\n(its cost against bare steps)")


def _memory_figure(comparisons: Sequence[Comparison], bars: int) -> Figure:
    """A panel a comparison, and one legend for all below them: the kinds in their order, then what was measured."""
    operators = _operators(entry.run for comparison in comparisons for entry in finished(comparison))
    figure = _bars(comparisons, bars, partial(_memory, operators=operators), inches=0.95)
    columns = 2 if max(map(len, operators), default=0) > 16 else 3  # a legend does not wrap
    _one_legend(figure, [*KIND_COLOURS, *operators, OTHERS, ALLOCATED, OUTSIDE, RESIDENT], columns)
    return figure


def _operators(runs: Iterable[Run]) -> list[str]:
    """Of the runs without a model, the operators that asked for most of what was live at their peaks."""
    sizes: dict[str, int] = {}
    for run in runs:
        if not run.result.get("memory_model"):
            for name, size in list((run.result.get("memory_by_op") or {}).items())[:OPERATORS]:
                sizes[name] = sizes.get(name, 0) + size
    return sorted(sizes, key=lambda name: -sizes[name])


def _memory(axes: Axes, entries: list[Entry], operators: Sequence[str]) -> None:
    """Three rows a run: the model, stacked by kind, or, where there is none, what was measured by operator; what was
    measured; how much more of the process was resident."""
    for place, entry in enumerate(entries):
        result = entry.run.result
        if model := _by_kind(result):
            kinds = [(size, kind, {"color": KIND_COLOURS.get(kind, "0.6")}) for kind, size in model.items()]
            right = _stack(axes, place - 0.25, kinds)
            _beside(axes, right, place - 0.25, f"{right:.4g} MB model")
        elif pieces := _by_operator(result, operators):
            _beside(axes, _stack(axes, place - 0.25, pieces), place - 0.25, "by operator")
        measured, workspace = result["peak_memory_bytes"] / 1e6, _outside(result)
        pieces = [(measured, ALLOCATED, {"color": "0.35"})]
        text = f"{measured:.4g} MB" + (f" ({percent(entry.model_difference)})" if model else "")
        if workspace:
            style = {"facecolor": "white", "edgecolor": "0.35", "hatch": "//////", "linewidth": 0.5}
            pieces.append((workspace, OUTSIDE, style))
            text += f" + {workspace:.3g} MB"
        _beside(axes, _stack(axes, place + 0.05, pieces), place + 0.05, text)
        if (resident := _resident(result)) is not None:
            axes.plot(resident, place + 0.3, "d", color="black", markersize=6, label=RESIDENT)
            _beside(axes, resident, place + 0.3, f"{resident:.4g} MB resident")
    axes.set_xlabel("peak memory of a step in MB, the batch included")


def _by_kind(result: dict[str, Any]) -> dict[str, float]:
    """The model in MB by kind; empty where there is none."""
    return {kind: sum(tensors.values()) / 1e6 for kind, tensors in (result.get("memory_model") or {}).items()}


def _by_operator(result: dict[str, Any], operators: Sequence[str]) -> list[Piece]:
    """The measured peak in MB: the batch, the largest by the operators that asked for them, the others in one piece."""
    live = list((result.get("memory_by_op") or {}).items())
    if not live:
        return []
    pieces: list[Piece] = [((result.get("batch_bytes") or 0) / 1e6, "inputs", {"color": KIND_COLOURS["inputs"]})]
    for name, size in live[:OPERATORS]:
        place = operators.index(name)
        colour = OPERATOR_COLOURS[place % len(OPERATOR_COLOURS)]
        pieces.append((size / 1e6, name, {"color": colour}))
    if rest := sum(size for _, size in live[OPERATORS:]):
        pieces.append((rest / 1e6, OTHERS, {"color": "0.8"}))
    return pieces


def _outside(result: dict[str, Any]) -> float:
    """MB that products hold beside the allocator's: packing buffers on a CPU; on a GPU they are of the allocator's."""
    return (result.get("workspace_bytes") or 0) / 1e6 if result.get("device") != "cuda" else 0.0


def _resident(result: dict[str, Any]) -> float | None:
    """By how many MB training raised the resident set, and the batch, which was there before; None if unknown."""
    before, peak, batch = (result.get(key) for key in ("rss_before_bytes", "peak_rss_bytes", "batch_bytes"))
    if result.get("device") != "cpu" or before is None or peak is None or batch is None:
        return None  # on a GPU the process holds none of the tensors
    return (peak - before + batch) / 1e6


def _stack(axes: Axes, y: float, pieces: Sequence[Piece]) -> float:
    """A bar of labelled pieces; returns where it ends."""
    left = 0.0
    for width, label, style in pieces:
        axes.barh(y, width, height=0.28, left=left, label=label, **style)
        left += width
    return left


def _beside(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), (6, 0), textcoords="offset points", va="center", fontsize=8)
