"""The list of all figures, each with its title and a sentence that says how to read it; and their files, in each of the
formats that were asked for.

A figure fails by itself: a figure that says why stands in the place of a figure that cannot be drawn.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from matplotlib import rc_context
from matplotlib.figure import Figure

from mpcompare.foreign import without_folders
from mpcompare.records import write_atomically
from mpcompare.report import formats
from mpcompare.report.columns import one_line
from mpcompare.report.comparison import Comparison
from mpcompare.report.contents import Report
from mpcompare.report.figures.digits import digits
from mpcompare.report.figures.dtypes import dtypes
from mpcompare.report.figures.exponents import exponents, update_ratio
from mpcompare.report.figures.glance import glance
from mpcompare.report.figures.gradient_error import gradient_error
from mpcompare.report.figures.kit import WIDTH, nothing
from mpcompare.report.figures.loss import loss, noise
from mpcompare.report.figures.memory import memory
from mpcompare.report.figures.texts import as_they_are, without_formulas
from mpcompare.report.figures.times import phases, step_time
from mpcompare.report.figures.training import training

T = TypeVar("T")
DPI = 150
# Files of the same figure are equal: they have no date, and SVG files the same names inside.
NO_DATE: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReportFigure:
    """A figure of a report."""

    draw: Callable[[Report], Figure | None]  # draws it; None where there is nothing to draw
    title: str  # the heading above it
    reading: str  # a sentence that says how to read it

    @property
    def name(self) -> str:
        """The name of its files."""
        return self.draw.__name__

    def __call__(self, report: Report) -> Figure | None:
        """Returns the figure, its texts shown as they are, but without the folders of this machine."""
        try:
            with as_they_are():
                figure = self.draw(replace(report, comparisons=[*map(_shown, report.comparisons)]))
                if figure is not None:
                    without_formulas(figure)
            return figure
        except Exception as error:
            return _excuse(self.name, error)

    def rendered(self, figure: Figure, render: Callable[[Figure], T]) -> T:
        """Returns what ``render`` makes of the figure, or of a figure that says why this one cannot be rendered. Raises
        OSError where it cannot be written."""
        try:
            return render(figure)
        except OSError:
            raise
        except Exception as error:
            return render(_excuse(self.name, error))


def _shown(comparison: Comparison) -> Comparison:
    """Returns a comparison whose texts name no folder. Its runs and verdicts stay the same objects."""
    texts = {name: without_folders(getattr(comparison, name)) for name in ("title", "dataset", "not_the_same")}
    entries = [replace(entry, label=without_folders(entry.label)) for entry in comparison.entries]
    return replace(comparison, **texts, entries=entries)


def _excuse(name: str, error: Exception) -> Figure:
    """Returns a figure that says why another cannot be drawn, and warns of it."""
    why = one_line(f"the figure {name} cannot be drawn ({type(error).__name__}: {error})")
    log.warning(why)
    with as_they_are():
        figure = Figure(figsize=(WIDTH, 1), layout="constrained")
        nothing(figure.subplots(), why)
        return figure


# By the names of their files, in the order in which a reader wants them.
FIGURES: Mapping[str, ReportFigure] = {each.name: each for each in (
    ReportFigure(glance, "Time, memory and verdict of each run",
                 "Time and memory are divided by the baseline's: smaller is better; colour and sign are the "
                 "verdict's."),
    ReportFigure(loss, "Loss",
                 "Curves that lie on each other computed the same loss; the panel below shows on a log axis how far "
                 "each is from the baseline's. Of more than 20 runs each has a panel."),
    ReportFigure(step_time, "Step time",
                 "A shorter bar is a faster step; the ratio is its time over the time of the baseline, with the "
                 "interval that holds it in 95 of 100 cases."),
    ReportFigure(phases, "Phases of a step",
                 "Each piece of a bar is the time of one phase, so two runs differ where their pieces differ in "
                 "length."),
    ReportFigure(memory, "Memory",
                 "The coloured bar is what must be live by the memory model, the grey bar what was measured; the two "
                 "should be of one length."),
    ReportFigure(training, "Training steps",
                 "Each panel is one quantity by step: rate, loss scale, norm of the gradients, and shares that 16 bits "
                 "lose."),
    ReportFigure(gradient_error, "Errors of the gradients",
                 "Each dot is the distance of a gradient from the exact one, and next to it the distance over its "
                 "limit: what lies right of the line breaks its limit."),
    ReportFigure(noise, "Loss compared with the noise",
                 "The grey band is how far correct runs lie from each other; a line that stays below the dashed limit "
                 "cannot be told from the reference."),
    ReportFigure(exponents, "Exponents",
                 "Each curve is the share of a tensor's values by power of two; what lies left of a limit underflows "
                 "in fp16, what lies right of it overflows."),
    ReportFigure(update_ratio, "Updates compared with their weights",
                 "Updates left of a dashed line are too small for that format, and are lost if the weights are stored "
                 "in it."),
    ReportFigure(dtypes, "Precision of each layer",
                 "A row is a layer and a cell the dtype that was observed there; pale cells are as in the baseline."),
    ReportFigure(digits, "Where the network loses its digits",
                 "A row is a layer, or the work before one; a mark right of the dashed line has lost more than half of "
                 "the digits of the precision, and the text next to it says why."),
)}  # fmt: skip


def write(report: Report, folder: Path) -> None:
    """Writes each figure that has something to show."""
    wanted = [each for each in formats.FIGURES if each in report.formats and report.is_drawn]
    for drawing in FIGURES.values() if wanted else ():
        if figure := drawing(report):
            figure.suptitle(drawing.title, fontsize=11, fontweight="bold", x=0.01, ha="left")
            for each in wanted:
                drawing.rendered(figure, partial(_save, path=folder / f"{drawing.name}.{each}"))


def _save(figure: Figure, path: Path) -> None:
    metadata = NO_DATE.get(path.suffix[1:])
    with rc_context({"svg.hashsalt": "mpcompare", "pdf.fonttype": 42}):  # publishers refuse fonts of type 3
        write_atomically(path, lambda unfinished: figure.savefig(unfinished, dpi=DPI, metadata=metadata))
