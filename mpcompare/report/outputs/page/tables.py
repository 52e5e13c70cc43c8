"""The tables of runs and of inference, with a key by which each cell is sorted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpcompare.report import digits as maps
from mpcompare.report import inference, summary
from mpcompare.report.columns import Column
from mpcompare.report.comparison import Comparison


@dataclass(frozen=True)
class Cell:
    """The text of a cell, and the number by which it is sorted; None where it is sorted by its text."""

    text: str
    key: float | None = None


@dataclass(frozen=True)
class Table:
    """A table: the columns, the cells of each row, and the class of each row, if rows have one."""

    columns: Sequence[Column[Any]]
    rows: Sequence[Sequence[Cell]]
    kinds: Sequence[str] = ()


def runs(comparison: Comparison) -> Table:
    """Returns the table of runs: what differs comes first, and the verdict stands beside the name.

    A run that did not finish has its names and its status.
    """
    names = (*summary.NAMES, "verdict")
    shown = summary.shown(comparison)
    columns = sorted(shown, key=lambda column: names.index(column.name) if column.name in names else len(names))
    rows = sorted(summary.rows_of(comparison), key=lambda row: row.entry.word.rank)
    cells = [
        [_cell(column, row) if row.entry.ok else Cell(summary.cell(column, row)) for column in columns] for row in rows
    ]
    return Table(columns, cells, [row.entry.word.kind for row in rows])


def ways(comparison: Comparison) -> Table:
    """Returns the table of inference: a row for each run and way; without rows where nothing was tried."""
    rows = inference.rows_of(comparison)
    cells = [[_cell(column, row) if row.shows(column) else Cell("") for column in inference.SHOWN] for row in rows]
    return Table(inference.SHOWN, cells)


def digits(comparison: Comparison) -> Table:
    """Returns the table of the digits that layers lose, in each precision of 16 bits."""
    rows = [row for each in maps.shown(comparison) for row in each.rows]
    return Table(maps.SHOWN, [[_cell(column, row) for column in maps.SHOWN] for row in rows])


def _cell(column: Column[Any], row: Any) -> Cell:
    value = column.value(row)
    first = value[0] if isinstance(value, tuple) else value
    number = float(first) if isinstance(first, (int, float)) else math.nan
    return Cell(column.cell(row), None if math.isnan(number) else number)
