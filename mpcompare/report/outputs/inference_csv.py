"""The file ``inference.csv``: a row for each run and each way of inference with its network."""

from pathlib import Path

from mpcompare.report import inference
from mpcompare.report.columns import values
from mpcompare.report.contents import Report
from mpcompare.report.outputs.files import write_csv


def write(report: Report, folder: Path) -> None:
    """Writes the file if any run has inference."""
    rows = (row for comparison in report.comparisons for row in inference.rows_of(comparison))
    write_csv(folder, "inference.csv", [values(inference.COLUMNS, row) for row in rows])
