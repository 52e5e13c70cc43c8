"""The figures of exponents: activations and gradients, and what fp16 and bf16 hold of them; and updates relative to
their weights, compared with the smallest that a format can add."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from mpcompare.precision import FP16, PRECISIONS
from mpcompare.report.contents import Report
from mpcompare.report.figures import histograms
from mpcompare.report.figures.judged import Counts, Judged, judged
from mpcompare.report.figures.kit import WIDTH, parts_of
from mpcompare.report.figures.texts import power

# Limits of fp16, log2: a number rounds to 0 below the first, is subnormal below the second, and inf from the third on.
ZERO, SUBNORMAL = math.log2(FP16.smallest_subnormal / 2), math.log2(FP16.smallest_normal)
INFINITE = float(math.ceil(math.log2(FP16.maximum)))
PANELS = ("activations", "gradients of activations", "gradients of weights")  # groups of numerics.json
# Unit roundoff u of the formats that weights are stored in, log2. Half the gap next to a normal weight w is between
# u |w| / 2 and u |w|, and an update below it is lost. So all updates below u / 2 are lost, and of the updates between
# u / 2 and u only a part.
ROUNDOFF = {each.storage.name: math.log2(each.storage.unit_roundoff) for each in PRECISIONS.values()}


def exponents(report: Report) -> Figure | None:
    """Draws figure 3 of Micikevicius et al., Mixed Precision Training (2018): the range of fp16 above, below it
    histograms of activations and gradients, and next to these the shares that fp16 loses. None where no run counted
    exponents."""
    drawn = [histograms.counted([run for run in runs if run.precision == "fp16"]) for runs in judged(report)]
    return parts_of(report.finished, drawn, _part, 8.6, 1.75 * WIDTH, "no run in fp16 counted exponents")


def _part(part: SubFigure, run: Judged) -> None:
    scale, chosen = run.first_scale, {title: histograms.chosen(run, title) for title in PANELS}
    strip, *panels = part.subplots(4, 1, sharex=True, height_ratios=(0.8, 3, 3, 3))
    low, high = histograms.ends([counts for counts, _ in chosen.values()], ZERO - math.log2(scale), INFINITE)
    _formats(strip, scale, low, high)
    strip.set_title(histograms.source(run), fontsize=9, loc="left")
    for axes, (title, (counts, left_out)) in zip(panels, chosen.items(), strict=True):
        used = 1.0 if title == "activations" else scale
        axes.axvspan(low, ZERO, color="0.84", zorder=0, linewidth=0)
        axes.axvspan(ZERO, SUBNORMAL, color="0.93", zorder=0, linewidth=0)
        axes.axvline(INFINITE, color="0.7", linewidth=1)
        if used != 1:
            _moved_limits(axes, used)
        histograms.draw(axes, counts, low, high)
        histograms.table(axes, "% of what is not 0", *_losses(counts["first"], used), left_out)
        axes.set_title(title, fontsize=9, loc="left")
    panels[-1].set_xlabel("|value|   (at the left: exactly 0)")


def lost_in_fp16(counts: Sequence[int], scale: float = 1.0) -> tuple[float, float]:
    """Returns the shares of the nonzero values, times ``scale``, that fp16 rounds to 0 and that are subnormal in it."""
    shift = math.log2(scale)
    return histograms.share(counts, -math.inf, ZERO - shift), histograms.share(counts, ZERO - shift, SUBNORMAL - shift)


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
    bf16 = f"normal: from {power(2, -126)} to {power(2, 128)}, as fp32's"
    _segment(axes, len(rows), low, high, bf16, "white")
    axes.set_yticks(range(len(rows) + 1), [*rows, "bf16"], fontsize=8)
    axes.set_ylim(len(rows) + 0.5, -0.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _moved_limits(axes: Axes, scale: float) -> None:
    """The limits of fp16 at the places to which a loss scale moves them, among the gradients without the scale."""
    shift = math.log2(scale)
    for limit in (ZERO, SUBNORMAL, INFINITE):
        axes.axvline(limit - shift, color="black", linestyle="--", linewidth=0.8)
    axes.annotate("", (SUBNORMAL - shift, 300), (SUBNORMAL, 300), arrowprops={"arrowstyle": "->"})
    white = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axes.text(SUBNORMAL, 300, f" with the loss scale {_power(scale)}", va="center", fontsize=8, bbox=white)


def _segment(axes: Axes, row: int, left: float, right: float, word: str, grey: str) -> None:
    axes.barh(row, right - left, 0.8, left=left, color=grey, edgecolor="0.3", linewidth=0.6)
    if right - left >= 0.9 * len(word) or word.startswith("normal:"):
        axes.text((left + right) / 2, row, word, ha="center", va="center", fontsize=7.5)


def _power(scale: float) -> str:
    exponent = math.log2(scale)
    return power(2, exponent) if exponent.is_integer() else f"{scale:g}"


def _losses(counts: Counts, scale: float) -> tuple[list[str], dict[str, str]]:
    """The heads and the cells of the table: the shares that fp16 loses of each tensor, without and with the scale."""
    scales = [1.0, scale] if scale != 1 else [1.0]
    words = ["in fp16", f"in fp16 x 2^{math.log2(scale):.4g}"]
    heads = ["".join(f"  {word:^16}" for word in words[: len(scales)]), f"{'to 0':>7}{'subnormal':>11}" * len(scales)]
    rows = {}
    for name, values in counts.items():
        lost = [lost_in_fp16(values, s) for s in scales]
        rows[name] = "".join(f"{histograms.percent(zero):>7}{histograms.percent(below):>11}" for zero, below in lost)
    return heads, rows


def update_ratio(report: Report) -> Figure | None:
    """Draws histograms of the updates over their weights; None where no format of the runs would lose an update."""
    drawn: list[tuple[Judged, Mapping[str, float]] | None] = []
    loses = False
    for runs in judged(report):
        asked = {PRECISIONS[run.precision].storage.name for run in runs}
        limits = {name: limit for name, limit in ROUNDOFF.items() if name in asked}
        run = histograms.counted(runs)
        drawn.append((run, limits) if run else None)
        counts = run.exponents("updates")["first"].values() if run else ()
        loses |= any(lost_updates(each)[name] > 0 for each in counts for name in limits)
    return parts_of(report.finished, drawn, _updates, 3.6, 1.75 * WIDTH, "no run counted exponents") if loses else None


def _updates(part: SubFigure, drawn: tuple[Judged, Mapping[str, float]]) -> None:
    axes, (run, limits) = part.subplots(), drawn
    counts, left_out = histograms.chosen(run, "updates")
    low, high = histograms.ends([counts], min(limits.values()), 0.0)
    axes.axvspan(low, max(limits.values()), color="0.93", zorder=0, linewidth=0)
    for precision, limit in limits.items():
        axes.axvline(limit, color="black", linestyle="--", linewidth=0.8)
        side = {"fp16": "right", "bf16": "left"}.get(precision, "center")
        axes.annotate(f"{precision}: {power(2, limit)}", (limit, 1), (0, 3), xycoords=axes.get_xaxis_transform(),
                      textcoords="offset points", ha=side, fontsize=8)  # fmt: skip
    histograms.draw(axes, counts, low, high)
    shares = {name: lost_updates(values) for name, values in counts["first"].items()}
    rows = {name: "".join(f"{histograms.percent(lost[each]):>9}" for each in limits) for name, lost in shares.items()}
    head = "".join(f"{each:>9}" for each in limits)
    histograms.table(axes, "% of what is not 0: lost (at most) in", [head], rows, left_out)
    title = histograms.source(run) + ("\n" if left_out else "")  # the names that are left out stand below the title
    axes.set_title(title, fontsize=9, loc="left", pad=16)
    axes.set_xlabel("|update| / |weight| of a first update at the full learning rate   (at the left: no update)\n"
                    "an update below half the gap next to its weight is lost: at most those left of the line",
                    fontsize=9)  # fmt: skip


def lost_updates(counts: Sequence[int]) -> dict[str, float]:
    """Returns by precision the share of the nonzero updates that is lost in weights of that precision, at most."""
    return {precision: histograms.share(counts, -math.inf, limit) for precision, limit in ROUNDOFF.items()}
