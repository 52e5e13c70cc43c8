"""The figures of a comparison, each with a sentence that says how to read it, and a text in its place."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from markupsafe import Markup

from mpcompare.report.comparison import Comparison
from mpcompare.report.contents import Report
from mpcompare.report.figures.captions import CAPTIONS
from mpcompare.report.figures.guarded import rendered
from mpcompare.report.figures.kit import WIDTH
from mpcompare.report.figures.registry import FIGURES
from mpcompare.report.outputs.page.svg import inline

WIDE = 1.25 * WIDTH  # inches: a wider figure takes both columns


@dataclass(frozen=True)
class Drawn:
    """A figure on the page."""

    name: str
    title: str
    reading: str
    svg: Markup
    wide: bool


def drawn(comparison: Comparison, report: Report, place: int) -> Iterator[Drawn]:
    """Yields the figures of one comparison that have something to show.

    Args:
        place: the number of the comparison on the page, from 0.
    """
    untitled = replace(comparison, title="", dataset="", not_the_same="")  # the page says these above the figures
    alone = Report([untitled], report.verdicts, report.baseline)
    labels = ", ".join(entry.label for entry in comparison.entries)
    for name, draw in FIGURES.items():
        if figure := draw(alone):
            title, reading = CAPTIONS[name]
            alt = f"{title} of {labels}. {reading} The tables and checks of this page hold the numbers."
            wide = figure.get_figwidth() > WIDE
            svg = rendered(name, figure, partial(inline, name=f"{name}{place}", alt=alt))
            yield Drawn(name, title, reading, svg, wide)
