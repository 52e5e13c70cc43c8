"""The verdict as figures: errors of gradients, noise, exponents. From records and verdicts only."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from mpcompare.report.comparison import Comparison, steps_of_both
from mpcompare.report.figures.exponents import exponents, seen, update_ratio
from mpcompare.report.figures.judged import Judged, compared, references, with_verdicts
from mpcompare.report.figures.kit import WIDTH, finished, grid, nothing, save
from mpcompare.verdict.judge.verdict import Verdict
from mpcompare.verdict.reading import relative_error

HATCHES = ("", "////", "....", r"\\\\", "xxxx", "----", "++++")


def draw(comparisons: Sequence[Comparison], verdicts: Mapping[str, Verdict], out: Path) -> None:
    """Writes ``gradient_error.png``, ``noise.png``, ``exponents.png`` and ``update_ratio.png`` into ``out``, those for
    which any run has the numbers; comparisons with no finished run are left out."""
    drawn = [c for c in comparisons if finished(c)]
    judged = [with_verdicts(c, verdicts) for c in drawn]
    if any(run.gradients for runs in judged for run in runs):
        save(gradient_error(drawn, judged), out / "gradient_error.png")
    if any(run.noise is not None or (run.reference and not run.is_reference) for runs in judged for run in runs):
        save(noise(drawn, judged), out / "noise.png")
    if any(map(seen, judged)):
        save(exponents(drawn, judged), out / "exponents.png")
        save(update_ratio(drawn, judged), out / "update_ratio.png")


def _legend(part: SubFigure, axes: Axes, columns: int = 2) -> None:
    """Below the panel, where it hides nothing."""
    if axes.get_legend_handles_labels()[1]:
        part.legend(loc="outside lower center", ncols=columns, fontsize=8)


def _at_the_top(axes: Axes, x: np.ndarray, colour: str) -> None:
    """Marks what has no place on the axis."""
    axes.plot(x, np.full(len(x), 0.97), "^", color=colour, transform=axes.get_xaxis_transform(), zorder=4)


def _positive(values: Iterable[float]) -> np.ndarray:
    """What a log axis can show."""
    array = np.array(list(values), dtype=float)
    return array[np.isfinite(array) & (array > 0)]


def _relative_limit(run: Judged, runs: Sequence[Judged], tensor: str) -> float:
    """Of the run, or for a reference that of the runs that were compared with it."""
    reference = run.reference.run.numerics if run.reference else None
    norm = ((reference or {}).get("first", {}).get("gradients", {}).get(tensor) or {}).get("norm", 0.0)
    limits = [
        r.limit(f"gradient in the first step, {tensor}") for r in (compared(run, runs) if run.is_reference else [run])
    ]
    return next((limit / norm for limit in limits if math.isfinite(limit) and norm), math.nan)


def gradient_error(comparisons: Sequence[Comparison], judged: Sequence[Sequence[Judged]]) -> Figure:
    """Bars by tensor, one a run; those with one reference stand together, below their limit."""
    bars = max(len(runs) * len(_tensors(runs)) for runs in judged)
    figure, parts = grid(comparisons, 4.2, max(WIDTH, 0.14 * bars))
    for part, runs in zip(parts, judged, strict=True):
        axes = part.subplots()
        _gradient_bars(axes, runs)
        axes.set_ylabel("||gradient - exact|| / ||exact||")
        twin = " of the smooth twin" if any(run.numerics.get("twin") for run in runs) else ""
        axes.set_xlabel(f"gradient{twin} in the first step\nexact: float64 from the same rounded weights and inputs\n"
                        "(gap: no error; triangle: inf, NaN or missing)", fontsize=9)  # fmt: skip
        _legend(part, axes)
    return figure


def _tensors(runs: Sequence[Judged]) -> list[str]:
    return list(dict.fromkeys(tensor for run in runs for tensor in run.gradients))


NOTHING = 1e-10  # of the largest gradient's norm: what is smaller is the rounding of float64 alone


def _vanishing(runs: Sequence[Judged], tensors: Sequence[str]) -> list[str]:
    """The tensors that the loss does not depend on, such as a bias before a norm: relative errors say nothing."""
    norms = {t: max((run.gradients.get(t) or {}).get("norm", 0.0) for run in runs) for t in tensors}
    finite = [norm for norm in norms.values() if math.isfinite(norm)]
    return [t for t, norm in norms.items() if norm < NOTHING * max(finite, default=0.0)]


def _no_gradients(run: Judged) -> str:
    return "" if run.gradients else ": not examined" if run.run.numerics is None else ": shows none"


def _gradient_bars(axes: Axes, runs: Sequence[Judged]) -> None:
    tensors, owners = _tensors(runs), [run.entry for run in references(runs)]
    if not tensors:
        return nothing(axes, "no run shows its gradients")
    if vanishing := _vanishing(runs, tensors):
        tensors = [tensor for tensor in tensors if tensor not in vanishing]
        names = ", ".join(vanishing[:3]) + (", ..." if len(vanishing) > 3 else "")
        axes.set_title(f"not drawn, exactly 0 ({len(vanishing)}): {names}", fontsize=7, loc="right")
    order = sorted(runs, key=lambda r: owners.index(r.reference) if r.reference in owners else len(owners))
    width, shown = 0.8 / len(order), []
    for column, run in enumerate(order):
        middle = np.arange(len(tensors)) + (column - (len(order) - 1) / 2) * width
        errors = np.array([relative_error(run.gradients.get(t, {})) if run.gradients else math.nan for t in tensors])
        limits = np.array([_relative_limit(run, runs, t) for t in tensors])
        label = run.entry.label + (" (reference)" if run.is_reference else "")
        axes.bar(
            middle,
            np.where(np.isfinite(errors), errors, 0),
            width,
            color=run.colour,
            hatch=HATCHES[run.place % 7],
            edgecolor="white",
            linewidth=0.5,
            label=label + _no_gradients(run),
        )
        _at_the_top(axes, middle[errors == math.inf], run.colour)
        outline = [patheffects.withStroke(linewidth=3.5, foreground="white")]
        ticks = axes.hlines(limits, middle - width / 2, middle + width / 2, color="black", lw=1.8, path_effects=outline)
        if np.isfinite(limits).any() and "limit" not in axes.get_legend_handles_labels()[1]:
            ticks.set_label("limit")
        shown += [*errors, *limits]
    axes.set_xticks(range(len(tensors)), tensors)
    if sum(map(len, tensors)) > 64:
        axes.tick_params(axis="x", labelrotation=35, labelsize=8)
        for text in axes.get_xticklabels():
            text.set_horizontalalignment("right")
    axes.set_yscale("log")
    if len(finite := _positive(shown)):
        axes.set_ylim(finite.min() / 3, finite.max() * 2)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    return None


def noise(comparisons: Sequence[Comparison], judged: Sequence[Sequence[Judged]]) -> Figure:
    """How far the loss of each run is from its reference's, before a band: how far correct runs are from each other.
    A panel a reference, of those that have a band or were compared with."""
    panels = [[r for r in references(runs) if r.noise is not None or compared(r, runs)] for runs in judged]
    figure, parts = grid(comparisons, 1.0 + 3.2 * max(1, *map(len, panels)))
    for part, runs, judges in zip(parts, judged, panels, strict=True):
        rows = part.subplots(max(len(judges), 1), 1, sharex=True, squeeze=False)[:, 0]
        for axes, reference in zip(rows, judges, strict=False):
            _noise(axes, reference, compared(reference, runs))
            axes.set_ylabel("|training loss - reference's|" if len(judges) < 3 else "|loss - reference's|")
        if not judges:
            nothing(rows[0], "nothing to compare with")
        rows[-1].set_xlabel("step   (gap: no difference; triangle: a loss is inf or NaN)")
        rows[-1].xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return figure


def _noise(axes: Axes, reference: Judged, runs: Sequence[Judged]) -> None:
    band, differences = reference.noise, [run.difference for run in runs]
    limits = dict.fromkeys(limit for run in runs if math.isfinite(limit := run.limit("loss over the run")))
    shown = _positive([*itertools.chain(*differences), *(band if band is not None else ()), *limits])
    bottom, top = (shown.min() / 2, shown.max() * 3) if len(shown) else (1e-9, 1.0)
    if band is not None:
        height = np.where(np.isfinite(band), band, top)
        before = int(reference.run.steps["step"].iloc[0]) - 1
        steps, ends = np.arange(before, before + len(band) + 2), np.concatenate((height[:1], height, height[-1:]))
        label = f"noise: {len(reference.numerics['noise']) + 1} runs of {reference.entry.label}"
        axes.fill_between(steps, bottom, ends, step="mid", color="0.85", linewidth=0, zorder=0, label=label)
        axes.set_xlim(before + 0.5, before + len(band) + 0.5)
    for limit in limits:
        axes.axhline(limit, color="0.2", linestyle="--", linewidth=1.2, label="limit")
    for run, difference in zip(runs, differences, strict=True):
        number = steps_of_both(run.run, reference.run)
        visible = np.where(difference > 0, difference, np.nan)
        axes.plot(number, visible, marker="o", markersize=3, label=run.entry.label, **run.line)
        _at_the_top(axes, number[~np.isfinite(difference)], run.colour)
    axes.set_yscale("log")
    axes.set_ylim(bottom, top)
    axes.grid(alpha=0.3)
    title = f"reference: {reference.entry.label}" + ("" if runs else ", and no other run to compare with it")
    axes.legend(title=title, alignment="left", loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False,
                fontsize=8, title_fontsize=9, borderaxespad=0)  # fmt: skip
