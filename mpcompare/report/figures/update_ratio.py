"""The figure of updates: relative to their weights, compared with the smallest that a format can add."""

import math
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure, SubFigure

from mpcompare.precision import PRECISIONS
from mpcompare.report.contents import Report
from mpcompare.report.figures import histograms
from mpcompare.report.figures.judged import Judged, judged
from mpcompare.report.figures.kit import WIDTH, parts_of
from mpcompare.report.figures.texts import power

# Unit roundoff u of the formats that weights are stored in, log2. Half the gap next to a normal weight w is between
# u |w| / 2 and u |w|, and an update below it is lost. So all updates below u / 2 are lost, and of the updates between
# u / 2 and u only a part.
ROUNDOFF = {each.storage.name: math.log2(each.storage.unit_roundoff) for each in PRECISIONS.values()}


def update_ratio(report: Report) -> Figure | None:
    """Draws histograms of the updates over their weights; None where no run counted exponents,
    and where no format of the runs would lose an update."""
    comparisons = judged(report)
    if not any(map(_loses, comparisons)):
        return None
    drawn = [(run, _limits(runs)) if (run := histograms.counted(runs)) else None for runs in comparisons]
    return parts_of(report.finished, drawn, _part, 3.6, 1.75 * WIDTH, "no run counted exponents")


def _limits(runs: Sequence[Judged]) -> dict[str, float]:
    asked = {run.precision for run in runs}
    return {name: limit for name, limit in ROUNDOFF.items() if name in asked}


def _loses(runs: Sequence[Judged]) -> bool:
    """Returns whether any update would be lost in a format of the runs."""
    run = histograms.counted(runs)
    counts = run.exponents("updates")["first"].values() if run else ()
    return any(lost_updates(each)[name] > 0 for each in counts for name in _limits(runs))


def _part(part: SubFigure, drawn: tuple[Judged, Mapping[str, float]]) -> None:
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
    axes.set_xlabel("lr |gradient| / |weight|   (at the left: gradient exactly 0)\n"
                    "an update below half the gap next to its weight is lost: at most those left of the line",
                    fontsize=9)  # fmt: skip


def lost_updates(counts: Sequence[int]) -> dict[str, float]:
    """Returns by precision the share of the nonzero updates that is lost in weights of that precision, at most."""
    return {precision: histograms.share(counts, -math.inf, limit) for precision, limit in ROUNDOFF.items()}
