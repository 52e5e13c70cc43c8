"""The file ``dtypes.csv``: a row for each layer of each run, with the dtypes that were observed."""

from pathlib import Path

from mpcompare.report import dtypes
from mpcompare.report.columns import values
from mpcompare.report.contents import Report
from mpcompare.report.outputs.files import write_csv


def write(report: Report, folder: Path) -> None:
    """Writes the file if any dtypes were observed."""
    rows = (row for comparison in report.comparisons for row in dtypes.rows_of(comparison))
    write_csv(folder, "dtypes.csv", [values(dtypes.COLUMNS, row) for row in rows])
