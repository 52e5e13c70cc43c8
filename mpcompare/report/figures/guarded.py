"""A figure that fails by itself: in the place of one that cannot be drawn stands one that says why."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from matplotlib.figure import Figure

from mpcompare.report.brief import one_line, without_folders
from mpcompare.report.comparison import Comparison
from mpcompare.report.contents import Report
from mpcompare.report.figures.kit import WIDTH, nothing
from mpcompare.report.figures.texts import as_they_are, without_formulas

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReportFigure:
    """A figure of a report.

    Attributes:
        draw: draws it; None where there is nothing to draw.
        title: the heading above it.
        reading: a sentence that says how to read it.
    """

    draw: Callable[[Report], Figure | None]
    title: str
    reading: str

    @property
    def name(self) -> str:
        """The name of its files."""
        return self.draw.__name__

    def __call__(self, report: Report) -> Figure | None:
        """Returns the figure, its texts shown as they are, but without the folders of this machine."""
        try:
            with as_they_are():
                figure = self.draw(_without_folders(report))
                if figure is not None:
                    without_formulas(figure)
            return figure
        except Exception as error:
            return _excuse(self.name, error)

    def rendered(self, figure: Figure, render: Callable[[Figure], T]) -> T:
        """Returns what ``render`` makes of the figure that was drawn, or of one that says why it cannot.

        Raises:
            OSError: it cannot be written.
        """
        try:
            return render(figure)
        except OSError:
            raise
        except Exception as error:
            return render(_excuse(self.name, error))


def _without_folders(report: Report) -> Report:
    return replace(report, comparisons=[_shown(comparison) for comparison in report.comparisons])


def _shown(comparison: Comparison) -> Comparison:
    """Returns a comparison whose texts name no folder. Runs and verdicts stay the same objects."""
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
