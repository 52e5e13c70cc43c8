"""The figure of updates: relative to their weights, beside the smallest that a format can add."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mpcompare.precision import FP16, PRECISIONS
from mpcompare.report.contents import Report
from mpcompare.report.figures import histograms
from mpcompare.report.figures.judged import Counts, Judged, judged
from mpcompare.report.figures.kit import WIDTH, grid, nothing
from mpcompare.report.figures.texts import power

# Unit roundoff u of the formats that weights are stored in, log2. Half the gap beside a normal weight w is between
# u |w| / 2 and u |w|, and an update below it is lost. So updates below u are at most lost: of those between u / 2 and u
# only a part is.
ROUNDOFF = {each.storage.name: math.log2(each.storage.unit_roundoff) for each in PRECISIONS.values()}


def update_ratio(report: Report) -> Figure | None:
    """Draws histograms of the updates over their weights; None where no run counted exponents."""
    comparisons = judged(report)
    if not any(map(histograms.counted, comparisons)):
        return None
    figure, parts = grid(report.finished, 3.6, 1.75 * WIDTH)
    for part, runs in zip(parts, comparisons, strict=True):
        axes = part.subplots()
        if run := histograms.counted(runs):
            _panel(axes, run)
        else:
            nothing(axes, "no run counted exponents")
    return figure


def _panel(axes: Axes, run: Judged) -> None:
    counts = run.exponents("updates")
    names, left_out = histograms.choose(histograms.nonempty(run, counts["first"]))
    low, high = histograms.ends([histograms.only(counts, names)], min(ROUNDOFF.values()), 0.0)
    axes.axvspan(low, ROUNDOFF[FP16.name], color="0.93", zorder=0, linewidth=0)
    for precision, limit in ROUNDOFF.items():
        axes.axvline(limit, color="black", linestyle="--", linewidth=0.8)
        side = {"fp16": "right", "bf16": "left"}.get(precision, "center")
        axes.annotate(f"{precision}: {power(2, limit)}", (limit, 1), (0, 3), xycoords=axes.get_xaxis_transform(),
                      textcoords="offset points", ha=side, fontsize=8)  # fmt: skip
    histograms.draw(axes, names, counts, low, high)
    histograms.table(axes, *_losses(names, counts["first"]), left_out)
    title = histograms.source(run) + ("\n" if left_out else "")  # above the names that are left out
    axes.set_title(title, fontsize=9, loc="left", pad=16)
    axes.set_xlabel("lr |gradient| / |weight|   (at the left: gradient exactly 0)\n"
                    "an update below half the gap beside its weight is lost: at most those left of the line",
                    fontsize=9)  # fmt: skip


def lost_updates(counts: Sequence[int]) -> dict[str, float]:
    """Returns by precision the share of the nonzero updates that is lost in weights of that precision, at most."""
    return {precision: histograms.share(counts, -math.inf, limit) for precision, limit in ROUNDOFF.items()}


def _losses(names: Sequence[str], counts: Counts) -> tuple[str, list[str]]:
    """The head and the rows of the table: the shares of the updates of each parameter that are lost."""
    width, shown = histograms.short(names)
    precisions = "".join(f"{precision:>9}" for precision in ROUNDOFF)
    head = "% of what is not 0: lost (at most) in\n" + " " * width + precisions
    rows = []
    for name, text in zip(names, shown, strict=True):
        shares = "".join(f"{histograms.percent(lost):>9}" for lost in lost_updates(counts[name]).values())
        rows.append(text + shares)
    return head, rows
