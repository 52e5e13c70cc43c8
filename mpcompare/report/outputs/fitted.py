"""Tables that fit a console: where not all columns find room, the others follow in further tables."""

from collections.abc import Iterator, Sequence
from typing import Any

import rich.box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from mpcompare.report.columns import Column

GAP, EDGES = 3, 2  # characters between columns, and at both ends of a row
Cells = Sequence[str | Text]


def tables(
    columns: Sequence[tuple[str, Column[Any]]], rows: Sequence[Cells], names: int, width: int
) -> Iterator[Table]:
    """Yields one table, or several where the console is too narrow for one.

    Args:
        columns: with their headings, the most important first.
        rows: the cells of each column.
        names: the number of columns that name a row; each table begins with them.
        width: of the console, in characters.
    """
    each = zip(columns, *rows, strict=True)
    sizes = [max(_size(cell, column.wraps) for cell in (heading, *cells)) for (heading, column), *cells in each]
    named = list(range(names))
    chosen: list[int] = []
    for at in range(names, len(columns)):
        if chosen and sum(sizes[each] + GAP for each in [*named, *chosen, at]) - GAP + EDGES > width:
            yield _table(columns, rows, names, [*named, *chosen])
            chosen = []
        chosen.append(at)
    yield _table(columns, rows, names, [*named, *chosen])


def _table(
    columns: Sequence[tuple[str, Column[Any]]], rows: Sequence[Cells], names: int, chosen: Sequence[int]
) -> Table:
    """Returns a table of the chosen columns. Rows that show nothing in them but their names are left out."""
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for at in chosen:
        heading, column = columns[at]
        table.add_column(heading, justify=column.justify, no_wrap=not column.wraps)
    for row in rows:
        if any(str(row[at]) for at in set(chosen) - set(range(names))):
            table.add_row(*(row[at] for at in chosen))
    return table


def _size(cell: str | Text, wraps: bool) -> int:
    """Returns the characters that a cell needs: half of them, and the longest word, where it may have two lines."""
    text = str(cell)
    return max(cell_len(text) // 2 + 1, *map(cell_len, text.split())) if wraps and text else cell_len(text)
