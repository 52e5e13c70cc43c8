"""The files for programs: ``summary.csv``, ``dtypes.csv``, ``digits.csv``, ``inference.csv`` and ``verdict.json``.

A table has a row a run in ``summary.csv``, and in the others one for each layer, or each way of inference, of each run.
"""

from pathlib import Path
from typing import Any

import pandas as pd

from mpcompare.records import write_atomically, write_json
from mpcompare.report import digits, dtypes, inference, summary
from mpcompare.report.columns import values
from mpcompare.report.contents import Report
from mpcompare.typed import WORDS

FORMULA = ("=", "+", "-", "@", "\t", "\r")


def summary_csv(report: Report, folder: Path) -> None:
    """Writes time, memory, loss and verdict of each run, compared with its baseline."""
    _write(folder / "summary.csv", summary_rows(report))


def summary_rows(report: Report) -> list[dict[str, Any]]:
    """Returns the rows of the file; a cell is None where a run that failed has no value."""
    return [values(summary.columns_of(row), row) for row in report.rows]


def dtypes_csv(report: Report, folder: Path) -> None:
    """Writes the dtypes of the layers if any were observed."""
    rows = [row for comparison in report.comparisons for row in dtypes.rows_of(comparison)]
    _write(folder / "dtypes.csv", [values(dtypes.COLUMNS, row) for row in rows])


def digits_csv(report: Report, folder: Path) -> None:
    """Writes the digits that layers lose in 16 bits if a run shows its layers."""
    maps = [each for comparison in report.comparisons for each in digits.maps(comparison)]
    _write(folder / "digits.csv", [values(digits.COLUMNS, row) for each in maps for row in each.rows])


def inference_csv(report: Report, folder: Path) -> None:
    """Writes the results of inference if any run has some."""
    rows = [row for comparison in report.comparisons for row in inference.rows_of(comparison)]
    _write(folder / "inference.csv", [values(inference.COLUMNS, row) for row in rows])


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes rows as CSV, with the columns of all of them, whole or not at all; no file if there are no rows.

    A spreadsheet takes a text that begins with one of ``FORMULA`` for a formula, and computes what a stranger wrote: an
    apostrophe before it makes it a text.
    """

    def text(value: Any) -> Any:
        is_formula = isinstance(value, str) and len(value) > 1 and value.startswith(FORMULA) and value not in WORDS
        return f"'{value}" if is_formula else value

    if rows:  # objects: a missing number would make floats of the whole numbers in its column
        table = pd.DataFrame([{key: text(value) for key, value in row.items()} for row in rows], dtype=object)
        write_atomically(path, lambda unfinished: table.to_csv(unfinished, index=False))


def verdict_json(report: Report, folder: Path) -> None:
    """Writes by run the verdict, and every check with its value and limit."""
    document = {}
    for name, verdict in report.verdicts.items():
        checks = [{"name": check.name, **vars(check), "passed": check.passed} for check in verdict.checks]
        document[name] = {**vars(verdict), "checks": checks}
    write_json(folder / "verdict.json", document, indent=2)
