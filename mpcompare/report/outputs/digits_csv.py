"""The file ``digits.csv``: a row for each layer of each run in 16 bits, with the digits that it loses."""

from pathlib import Path

from mpcompare.report import digits
from mpcompare.report.columns import values
from mpcompare.report.contents import Report
from mpcompare.report.outputs.files import write_csv


def write(report: Report, folder: Path) -> None:
    """Writes the file if a run shows its layers."""
    maps = (each for comparison in report.comparisons for each in digits.maps(comparison, report.verdicts))
    write_csv(folder, "digits.csv", [values(digits.COLUMNS, row) for each in maps for row in each.rows])
