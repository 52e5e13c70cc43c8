"""The loss scales as a figure: a panel for each scaler, with torch's behind it."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mpcompare.report.figures.kit import colour
from mpcompare.scalers.overflows import OverflowStep
from mpcompare.scalers.trace import Trace, parting

BEHIND, THRESHOLD = "0.75", "0.45"  # torch's line in the panels of the others; the thresholds


def scales(traces: Sequence[Trace], steps: Sequence[OverflowStep], title: str) -> Figure:
    """Draws each scale over the steps, and the thresholds where they are known. ``traces`` start with torch's."""
    figure = Figure(figsize=(8, 0.9 + 1.25 * len(traces)), layout="constrained")
    rows = figure.subplots(len(traces), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    thresholds = [math.nan if step.threshold is None else math.log2(step.threshold) for step in steps]
    for place, (axes, trace) in enumerate(zip(rows, traces, strict=True)):
        axes.plot(range(1, len(steps) + 1), thresholds, ".", color=THRESHOLD, markersize=3)
        _panel(axes, trace, traces[0], colour(place))
    rows[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    rows[0].yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    rows[0].yaxis.set_major_formatter(FuncFormatter(lambda exponent, _: f"$2^{{{exponent:.0f}}}$"))
    rows[-1].set_xlabel("step", fontsize=9)
    figure.supylabel("loss scale of the step (log scale)", fontsize=9)
    figure.suptitle(title, fontsize=9, x=0.02, ha="left", parse_math=False)
    stopped, known = any(trace.stopped for trace in traces), not all(map(math.isnan, thresholds))
    marks = [
        Line2D([], [], color=BEHIND, linewidth=3, label="torch"),
        Line2D([], [], color="black", marker="x", linestyle="", label="skipped"),
        Line2D([], [], color="black", linestyle=":", label="first step taken unlike torch"),
        *[Line2D([], [], color="black", marker="s", linestyle="", label="ends with an error")] * stopped,
        *[Line2D([], [], color=THRESHOLD, marker=".", linestyle="", label="largest finite scale")] * known,
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False, fontsize=8)
    return figure


def _panel(axes: Axes, trace: Trace, torch: Trace, shade: str) -> None:
    if trace is not torch:
        _line(axes, _exponents(torch), color=BEHIND, linewidth=3)
    heights = _exponents(trace)
    _line(axes, heights, color=shade, linewidth=1.5)
    skipped = [place for place, step in enumerate(trace.steps) if step.skipped and not step.stopped]
    axes.plot([place + 1 for place in skipped], [heights[place] for place in skipped], "x", color=shade, markersize=6)
    if trace.stopped:
        axes.plot(len(heights), heights[-1], "s", color=shade, markersize=6)
    label = trace.name
    if parted := parting(torch, trace):
        axes.axvline(parted[0], color="black", linestyle=":", linewidth=1)
        label += ", from step {} unlike torch: {}".format(*parted)
    axes.set_title(label, fontsize=9, loc="left", color=shade)
    axes.set_xlim(0.5, len(torch.steps) + 0.5)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _line(axes: Axes, heights: Sequence[float], **style: Any) -> None:
    """Draws a level from half a step before each step to half a step after it."""
    edges = [place + 0.5 for place in range(len(heights) + 1)]
    axes.step(edges, [*heights, heights[-1]], where="post", **style)


def _exponents(trace: Trace) -> list[float]:
    """Returns log2 of the scale of each step; NaN, which leaves a gap, where the scale is 0 or inf."""
    return [math.log2(step.before) if 0 < step.before < math.inf else math.nan for step in trace.steps]
