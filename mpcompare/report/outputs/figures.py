"""The figures as files, in each of the formats that were asked for."""

from functools import partial
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from mpcompare.records import write_atomically
from mpcompare.report import formats
from mpcompare.report.contents import Report
from mpcompare.report.figures.registry import FIGURES

DPI = 150
# Files of the same figure are equal: they have no date, and SVG files the same names inside.
NO_DATE: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


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
