"""The figure of gradient errors: how far each run's gradients in the first step are from exact ones."""

from matplotlib.figure import Figure

from mpcompare.report.contents import Report
from mpcompare.report.figures import gradient_bars, gradient_rows
from mpcompare.report.figures.gradients import gradients_of
from mpcompare.report.figures.judged import judged
from mpcompare.report.figures.kit import WIDTH, grid, nothing

WIDEST = 2 * WIDTH  # inches: bars that take more become rows of dots
ERROR = "||gradient - exact|| / ||exact||"


def gradient_error(report: Report) -> Figure | None:
    """Draws bars by tensor, one a run; for a large network a row of dots for each tensor, or for those of equal layers.
    None where no run shows its gradients."""
    panels = judged(report)
    drawn = [gradients_of(runs) for runs in panels]
    if not any(run.gradients for runs in panels for run in runs):
        return None
    width = max(map(gradient_bars.width_of, drawn))
    layouts = [gradient_rows.layout_of(gradients) if width > WIDEST else None for gradients in drawn]
    rows = [layout for layout in layouts if layout]
    height, width = (max(each.height for each in rows), max(each.width for each in rows)) if rows else (4.2, width)
    figure, parts = grid(report.finished, height, max(WIDTH, width))
    for part, gradients, layout in zip(parts, drawn, layouts, strict=True):
        caption = "gradient in the first step\nexact: float64 from the operands that each layer had"
        if not gradients.tensors:
            nothing(part.subplots(), "no run shows its gradients")
        elif layout:
            gradient_rows.draw(part, gradients, layout, ERROR, caption)
        else:
            gradient_bars.draw(part, gradients, ERROR, caption)
    return figure
