"""The figures of a comparison as SVG that stands in a page: small, without an XML header, and with ids that no other
figure has."""

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mpcompare.report.comparison import Comparison
from mpcompare.report.contents import Report
from mpcompare.report.figures.kit import WIDTH
from mpcompare.report.figures.registry import FIGURES
from mpcompare.report.verdicts import COLOURS

WIDE = 1.25 * WIDTH  # inches: a wider figure takes both columns
MARKS = 250  # a line shows about so many marks: one mark takes 100 bytes
# Text stays text, in the reader's font. Points that shift a line by less than half a pixel are left out.
_SETTINGS: dict[Any, Any] = {"svg.fonttype": "none", "path.simplify_threshold": 0.5, "svg.hashsalt": "mpcompare"}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_STYLE = re.compile(r"<defs>\s*<style.*?</style>\s*</defs>", re.DOTALL)  # a style would hold for the whole page
_NUMBERS = re.compile(r'(?<= )(d|x|y)="([^"]*)"')
_NUMBER = re.compile(r"-?\d+\.\d+")
_GREY = re.compile(r"#([0-9a-f]{2})\1\1\b")
_COMMAND = re.compile(r"\s*([A-Za-z])\s*")
_ID = re.compile(r' id="([^"]*)"')
_REFERENCE = re.compile(r'(url\(#|href="#)([^")]*)')


def drawn(comparison: Comparison, report: Report, place: int) -> Iterator[dict[str, Any]]:
    """Yields what the templates show of each figure of one comparison that has something to show, with a text in its
    place. ``place`` is the number of the comparison on the page, from 0."""
    untitled = replace(comparison, title="", dataset="", not_the_same="")  # the page says these above the figures
    alone = Report([untitled], report.baseline)
    labels = ", ".join(entry.label for entry in comparison.entries)
    for each in FIGURES.values():
        if figure := each(alone):
            alt = f"{each.title} of {labels}. {each.reading} The tables and checks of this page hold the numbers."
            wide = figure.get_figwidth() > WIDE
            svg = each.rendered(figure, partial(inline, name=f"{each.name}{place}", alt=alt))
            yield {"figure": each, "svg": svg, "wide": wide}


def inline(figure: Figure, name: str, alt: str) -> Markup:
    """Returns a figure as an ``<svg>`` element.

    Args:
        name: a word that no other figure of the page has; its ids begin with it.
        alt: the text for readers who do not see the figure.
    """
    for line in figure.findobj(Line2D):
        if isinstance(line, Line2D) and line.get_marker() not in (None, "None", ""):
            line.set_markevery(max(1, len(line.get_xdata(orig=True)) // MARKS))  # type: ignore[arg-type]
    text = io.StringIO()
    with matplotlib.rc_context(_SETTINGS):
        # Tight: labels that are too long for the figure widen it, and are not cut.
        figure.savefig(
            text, format="svg", metadata=_NO_METADATA, transparent=True, bbox_inches="tight", pad_inches=0.05
        )
    return Markup(_shrink(_with_own_ids(text.getvalue(), name), alt))


def _with_own_ids(svg: str, name: str) -> str:
    """Returns the SVG with a prefix before each id that is referred to, and without the others."""
    used = {reference for _, reference in _REFERENCE.findall(svg)}
    svg = _ID.sub(lambda match: f' id="{name}-{match[1]}"' if match[1] in used else "", svg)
    return _REFERENCE.sub(rf"\g<1>{name}-\g<2>", svg)


def _shrink(svg: str, alt: str) -> str:
    """Returns the ``<svg>`` element alone, with coordinates to a tenth of a point."""
    svg = _STYLE.sub("", _COMMENT.sub("", svg[svg.index("<svg") :]))
    svg = _NUMBERS.sub(lambda match: f'{match[1]}="{_coordinates(match[2])}"', svg)
    for kind in ("same", "differs", "near"):
        svg = svg.replace(COLOURS[kind], f"var(--{kind})")
    svg = _GREY.sub(_of_theme, svg)
    svg = re.sub(r">\s*\n\s*<", "><", svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(alt)}" ', 1)


def _of_theme(grey: re.Match[str]) -> str:
    """Returns a grey as a mixture of the colours of text and ground: in the dark both colours are others."""
    share = round(100 * (1 - int(grey[1], 16) / 255))
    return f"color-mix(in srgb,var(--text) {share}%,var(--ground))"


def _coordinates(text: str) -> str:
    rounded = _NUMBER.sub(lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), text)
    return _COMMAND.sub(r"\1", rounded)
