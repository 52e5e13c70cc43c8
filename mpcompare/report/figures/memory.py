"""The figure of memory: the analytic model by kind of tensor, compared with what was measured."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mpcompare.fields import Finished
from mpcompare.numerals import short
from mpcompare.report.columns import percent
from mpcompare.report.comparison import Entry
from mpcompare.report.contents import Report
from mpcompare.report.figures.kit import bars, beside, one_legend
from mpcompare.report.runs import Run

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
# Colours of operators, where no model tells the kinds: muted, so that nobody takes them for kinds.
OPERATOR_COLOURS = [colormaps["tab20b"](place) for place in (0, 6, 9, 13, 17, 2, 5, 10, 14, 18)]
OPERATORS, OTHERS = 5, "other operators"  # the number of operators that are told apart in a run, and the rest
# Labels of the measured rows; short, because a legend does not wrap.
ALLOCATED = "measured: allocator"
OUTSIDE = "measured: packing buffers"
RESIDENT = "measured: rise of RSS"  # a triangle where it is beyond the axis
FAR = 1.2  # times the longest bar: a resident set beyond it is a triangle there, and the bars stay readable
Piece = tuple[float, str, dict[str, Any]]  # width, label and style of a part of a stacked bar


def memory(report: Report) -> Figure | None:
    """Draws a panel a comparison, and one legend for all below them: the kinds in their order, then what was measured.
    None where no run finished."""
    operators = _operators(entry.run for comparison in report.finished for entry in comparison.finished)
    ncols = 2 if max(map(len, operators), default=0) > 16 else 3  # a legend does not wrap
    if figure := bars(report.finished, partial(_memory, operators=operators), inches=0.95, many=0.6):
        one_legend(figure, [*KIND_COLOURS, *operators, OTHERS, ALLOCATED, OUTSIDE, RESIDENT], ncols)
    return figure


def _operators(runs: Iterable[Run]) -> list[str]:
    """The operators that asked for most of what was live at the peaks of the runs without a model."""
    sizes: Counter[str] = Counter()
    for run in runs:
        if not run.finished.memory.memory_model:
            sizes.update(dict(list(run.finished.memory.memory_by_op.items())[:OPERATORS]))
    return [name for name, _ in sizes.most_common()]


def _memory(axes: Axes, entries: Sequence[Entry], operators: Sequence[str]) -> None:
    """Three rows a run: the model by kind, or else the peak by operator; the measured peak; the rise of RSS."""
    far = FAR * max(map(_longest, entries))
    for place, entry in enumerate(entries):
        result = entry.run.finished
        if model := _by_kind(result):
            kinds = [(size, kind, {"color": KIND_COLOURS.get(kind, "0.6")}) for kind, size in model.items()]
            right = _stack(axes, place - 0.25, kinds)
            beside(axes, right, place - 0.25, f"{short(right)} MB model")
        elif pieces := _by_operator(result, operators):
            beside(axes, _stack(axes, place - 0.25, pieces), place - 0.25, "by operator")
        measured, workspace = result.memory.peak_memory_bytes / 1e6, _outside(result)
        pieces = [(measured, ALLOCATED, {"color": "0.35"})]
        text = f"{short(measured)} MB" + (f" ({percent(entry.model_difference)})" if model else "")
        if workspace:
            style = {"facecolor": "white", "edgecolor": "0.35", "hatch": "//////", "linewidth": 0.5}
            pieces.append((workspace, OUTSIDE, style))
            text += f" + {workspace:.3g} MB"
        beside(axes, _stack(axes, place + 0.05, pieces), place + 0.05, text)
        if (resident := _resident(result)) is not None:
            at, mark = min((resident, "d"), (far, ">"))
            axes.plot(at, place + 0.3, mark, color="black", markersize=6, label=RESIDENT)
            beside(axes, at, place + 0.3, f"{short(resident)} MB resident")
    axes.set_xlabel("peak memory of a step in MB, the batch included")


def _longest(entry: Entry) -> float:
    """The MB at which the longest bar of a run ends."""
    result = entry.run.finished
    return max(sum(_by_kind(result).values()), result.memory.peak_memory_bytes / 1e6 + _outside(result))


def _by_kind(result: Finished) -> dict[str, float]:
    """The model in MB by kind; empty where there is none."""
    return {kind: sum(tensors.values()) / 1e6 for kind, tensors in result.memory.memory_model.items()}


def _by_operator(result: Finished, operators: Sequence[str]) -> list[Piece]:
    """The measured peak in MB: the batch, the largest by the operators that asked for them, the others in one piece."""
    live = list(result.memory.memory_by_op.items())
    if not live:
        return []
    pieces: list[Piece] = [((result.memory.batch_bytes or 0) / 1e6, "inputs", {"color": KIND_COLOURS["inputs"]})]
    for name, size in live[:OPERATORS]:
        colour = OPERATOR_COLOURS[operators.index(name) % len(OPERATOR_COLOURS)]
        pieces.append((size / 1e6, name, {"color": colour}))
    if rest := sum(size for _, size in live[OPERATORS:]):
        pieces.append((rest / 1e6, OTHERS, {"color": "0.8"}))
    return pieces


def _outside(result: Finished) -> float:
    """The MB that products hold outside of the allocator: packing buffers on a CPU; on a GPU there are none."""
    return (result.memory.workspace_bytes or 0) / 1e6 if result.machine.device != "cuda" else 0.0


def _resident(result: Finished) -> float | None:
    """The MB by which training raised the resident set, and the batch, which was there before; None if unknown."""
    before, peak = result.training.rss_before_bytes, result.training.peak_rss_bytes
    batch = result.memory.batch_bytes
    if result.machine.device != "cpu" or before is None or peak is None or batch is None:
        return None  # on a GPU the process holds none of the tensors
    return (peak - before + batch) / 1e6


def _stack(axes: Axes, y: float, pieces: Sequence[Piece]) -> float:
    """Draws a bar of labelled pieces and returns where it ends."""
    left = 0.0
    for width, label, style in pieces:
        axes.barh(y, width, height=0.28, left=left, label=label, **style)
        left += width
    return left
