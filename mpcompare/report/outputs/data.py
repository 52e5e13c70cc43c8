"""The files for programs: ``summary.csv``, ``dtypes.csv``, ``digits.csv``, ``inference.csv`` and ``verdict.json``.

A table has a row a run in ``summary.csv``, and in the others one for each layer, or each way of inference, of each run.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mpcompare.records import write_json
from mpcompare.report import digits, dtypes, inference, summary
from mpcompare.report.columns import Column, values
from mpcompare.report.contents import Report
from mpcompare.report.outputs.files import path_in, write_csv


def summary_csv(report: Report, folder: Path) -> None:
    """Writes time, memory, loss and verdict of each run, compared with its baseline."""
    write_csv(folder, "summary.csv", summary_rows(report))


def summary_rows(report: Report) -> list[dict[str, Any]]:
    """Returns the rows of the file; a cell is None where a run that failed has no value."""
    return [
        values(summary.columns_of(row), row)
        for comparison in report.comparisons
        for row in summary.rows_of(comparison, report.verdicts)
    ]


def dtypes_csv(report: Report, folder: Path) -> None:
    """Writes the dtypes of the layers if any were observed."""
    rows = (row for comparison in report.comparisons for row in dtypes.rows_of(comparison))
    _write(folder, "dtypes.csv", dtypes.COLUMNS, rows)


def digits_csv(report: Report, folder: Path) -> None:
    """Writes the digits that layers lose in 16 bits if a run shows its layers."""
    maps = (each for comparison in report.comparisons for each in digits.maps(comparison, report.verdicts))
    _write(folder, "digits.csv", digits.COLUMNS, (row for each in maps for row in each.rows))


def inference_csv(report: Report, folder: Path) -> None:
    """Writes the results of inference if any run has some."""
    rows = (row for comparison in report.comparisons for row in inference.rows_of(comparison))
    _write(folder, "inference.csv", inference.COLUMNS, rows)


def _write(folder: Path, name: str, columns: Iterable[Column[Any]], rows: Iterable[Any]) -> None:
    write_csv(folder, name, [values(columns, row) for row in rows])


def verdict_json(report: Report, folder: Path) -> None:
    """Writes by run the verdict, and every check with its value and limit."""
    document = {}
    for name, verdict in report.verdicts.items():
        checks = [{"name": check.name, **vars(check), "passed": check.passed} for check in verdict.checks]
        document[name] = {**vars(verdict), "checks": checks}
    write_json(path_in(folder, "verdict.json"), document, indent=2)
