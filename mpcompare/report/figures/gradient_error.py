"""The figure of gradient errors: how far each run's gradients in the first step are from exact ones."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mpcompare.report.contents import Report
from mpcompare.report.figures.judged import Judged, compared, judged, references
from mpcompare.report.figures.kit import WIDTH, at_the_top, grid, nothing, positive
from mpcompare.verdict.findings import relative_error

HATCHES = ("", "////", "....", r"\\\\", "xxxx", "----", "++++")
NOTHING = 1e-10  # times the largest gradient's norm: a smaller one is the rounding of float64 alone


def gradient_error(report: Report) -> Figure | None:
    """Draws bars by tensor, one a run; those with one reference stand together, below their limit. None where no run
    shows its gradients."""
    panels = judged(report)
    if not any(run.gradients for runs in panels for run in runs):
        return None
    bars = max(len(runs) * len(_tensors(runs)) for runs in panels)
    figure, parts = grid(report.finished, 4.2, max(WIDTH, 0.14 * bars))
    for part, runs in zip(parts, panels, strict=True):
        axes = part.subplots()
        _panel(axes, runs)
        axes.set_ylabel("||gradient - exact|| / ||exact||")
        twin = " of the smooth twin" if any(run.at_twin for run in runs) else ""
        axes.set_xlabel(f"gradient{twin} in the first step\nexact: float64 from the same rounded weights and inputs\n"
                        "(gap: no error; triangle: inf, NaN or missing)", fontsize=9)  # fmt: skip
        if axes.get_legend_handles_labels()[1]:
            part.legend(loc="outside lower center", ncols=2, fontsize=8)  # hides no bar
    return figure


def _tensors(runs: Sequence[Judged]) -> list[str]:
    return list(dict.fromkeys(tensor for run in runs for tensor in run.gradients))


def _vanishing(runs: Sequence[Judged], tensors: Sequence[str]) -> list[str]:
    """The tensors that the loss does not depend on, such as a bias before a norm: relative errors say nothing."""
    norms = {tensor: max(run.norm(tensor) for run in runs) for tensor in tensors}
    finite = [norm for norm in norms.values() if math.isfinite(norm)]
    return [tensor for tensor, norm in norms.items() if norm < NOTHING * max(finite, default=0.0)]


def _panel(axes: Axes, runs: Sequence[Judged]) -> None:
    tensors, owners = _tensors(runs), [run.entry for run in references(runs)]
    if not tensors:
        nothing(axes, "no run shows its gradients")
        return
    if vanishing := _vanishing(runs, tensors):
        tensors = [tensor for tensor in tensors if tensor not in vanishing]
        names = ", ".join(vanishing[:3]) + (", ..." if len(vanishing) > 3 else "")
        axes.set_title(f"not drawn, exactly 0 ({len(vanishing)}): {names}", fontsize=7, loc="right")
    order = sorted(runs, key=lambda r: owners.index(r.reference) if r.reference in owners else len(owners))
    width, heights = 0.8 / len(order), []
    for place, run in enumerate(order):
        middle = np.arange(len(tensors)) + (place - (len(order) - 1) / 2) * width
        errors = np.array([relative_error(run.gradients.get(t)) if run.gradients else math.nan for t in tensors])
        limits = np.array([_relative_limit(run, runs, tensor) for tensor in tensors])
        _bars(axes, run, middle, width, errors)
        _limits(axes, middle, width, limits)
        heights += [*errors, *limits]
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


def _relative_limit(run: Judged, runs: Sequence[Judged], tensor: str) -> float:
    """The limit of a run's error, or, for a reference, of the runs that were compared with it; NaN if there is none."""
    norm = run.reference_norm(tensor)
    judges = compared(run, runs) if run.is_reference else [run]
    limits = [judge.limit(f"gradient in the first step, {tensor}") for judge in judges]
    return next((limit / norm for limit in limits if math.isfinite(limit) and norm), math.nan)


def _bars(axes: Axes, run: Judged, middle: np.ndarray, width: float, errors: np.ndarray) -> None:
    without = "" if run.gradients else ": shows none" if run.findings else ": not examined"
    axes.bar(
        middle,
        np.where(np.isfinite(errors), errors, 0),
        width,
        color=run.colour,
        hatch=HATCHES[run.place % len(HATCHES)],
        edgecolor="white",
        linewidth=0.5,
        label=run.entry.label + (" (reference)" if run.is_reference else "") + without,
    )
    at_the_top(axes, middle[errors == math.inf], run.colour, 0.97)


def _limits(axes: Axes, middle: np.ndarray, width: float, limits: np.ndarray) -> None:
    outline = [patheffects.withStroke(linewidth=3.5, foreground="white")]
    ticks = axes.hlines(limits, middle - width / 2, middle + width / 2, color="black", lw=1.8, path_effects=outline)
    if np.isfinite(limits).any() and "limit" not in axes.get_legend_handles_labels()[1]:
        ticks.set_label("limit")
