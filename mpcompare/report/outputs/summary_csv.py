"""The file ``summary.csv``: a row a run, its time, memory, loss and verdict beside those of its baseline."""

from pathlib import Path
from typing import Any

from mpcompare.report import summary
from mpcompare.report.columns import values
from mpcompare.report.contents import Report
from mpcompare.report.outputs.files import write_csv


def write(report: Report, folder: Path) -> None:
    write_csv(folder, "summary.csv", rows(report))


def rows(report: Report) -> list[dict[str, Any]]:
    """Returns the rows of the file; a cell is None where a run that failed has no value."""
    return [
        values(summary.columns_of(row), row)
        for comparison in report.comparisons
        for row in summary.rows_of(comparison, report.verdicts)
    ]
