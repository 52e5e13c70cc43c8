"""The figures as PNG files."""

from functools import partial
from pathlib import Path

from mpcompare.records import write_atomically
from mpcompare.report.contents import Report
from mpcompare.report.figures.registry import FIGURES
from mpcompare.report.outputs.files import path_in

DPI = 150


def write(report: Report, folder: Path) -> None:
    """Writes each figure that has something to show."""
    for name, draw in FIGURES.items():
        if figure := draw(report):
            write_atomically(path_in(folder, name), partial(figure.savefig, dpi=DPI))
