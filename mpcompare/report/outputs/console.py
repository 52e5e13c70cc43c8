"""The report on a console: a table for each comparison, and beneath it remarks, phases and inference.

Where not all columns of a table find room, the others follow in further tables.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import rich.box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mpcompare.numerals import short
from mpcompare.phases import WHOLE_STEP
from mpcompare.report import dtypes, inference, remarks, summary
from mpcompare.report.answers import answers
from mpcompare.report.clock import clocks_cost
from mpcompare.report.columns import TEXT, Column
from mpcompare.report.comparison import Comparison, Entry, phases_of
from mpcompare.report.contents import Report
from mpcompare.verdict.judge.word import Word

PIPE = 200  # characters: a file or a pipe has no width, and is not wrapped at 80
GAP, EDGES = 3, 2  # characters between columns, and at both ends of a row
STYLES = {
    Word.SAME: "green",
    Word.DIFFERS: "red",
    Word.NOT_SEEN: "yellow",
    Word.NOT_COMPARABLE: "yellow",
    Word.WITHIN_NOISE: "yellow",
}
Cells = Sequence[str | Text]


def write(report: Report, folder: Path) -> None:
    """Prints the report; ``folder`` is for outputs that are files."""
    console = Console(markup=False, emoji=False)  # a label may have brackets
    if not (in_terminal := console.is_terminal):
        console = Console(width=PIPE, markup=False, emoji=False)
    for comparison in report.comparisons:
        with nullcontext() if in_terminal else console.capture() as captured:
            _show(console, comparison)
        if captured:  # tables are padded with blanks
            lines = captured.get().removesuffix("\n").split("\n")
            console.out("\n".join(line.rstrip() for line in lines), highlight=False)
    if not report.has_baseline:
        print(f"report.baseline={report.baseline} is not among the runs: compared with the first that finished")


def _show(console: Console, comparison: Comparison) -> None:
    console.print(Text(comparison.title, style="bold"))
    console.print(Text(comparison.dataset))
    if comparison.not_the_same:
        console.print(Text(comparison.not_the_same, style="bold red"))
    console.print(*_runs(comparison, console.width))
    _lines(console, remarks.because(comparison) + remarks.unchecked(comparison) + remarks.resumed(comparison))
    _lines(console, remarks.timing(comparison) + dtypes.lines(comparison))
    if comparison.finished:
        console.print(*_phases(comparison, console.width))
    if inference.rows_of(comparison):
        console.print(*inference_tables(comparison, console.width))
        _lines(console, inference.lines(comparison))
    for entry in comparison.entries:
        if not entry.ok:
            _lines(console, [f"{entry.label}: {entry.run.result.status}: {entry.error}"], "red")
        elif text := remarks.memory(entry):
            _lines(console, [text], "yellow")
    answered = Table.grid(padding=(0, 2, 0, 0))
    for answer in answers(comparison):
        answered.add_row(Text(answer.question, style="bold"), Text("\n".join(answer.lines())))
    console.print(answered)


def _lines(console: Console, lines: list[str], style: str = "") -> None:
    for line in lines:  # in a pipe a remark is one line, however long
        console.print(Text(line, style=style), soft_wrap=not console.is_terminal)


def _runs(comparison: Comparison, width: int) -> Iterator[Table]:
    """The columns that say something of these runs; ``summary.csv`` has more."""
    columns = summary.shown(comparison)
    rows: list[list[str | Text]] = []
    for row in comparison.rows:
        verdict = row.entry.verdict
        style = "red" if not row.entry.ok else STYLES.get(verdict.word, "") if verdict else ""
        cells = [(column.name, summary.cell(column, row)) for column in columns]
        coloured = ("verdict",) if row.entry.ok else (*summary.NAMES, "verdict")
        rows.append([Text(cell, style=style if name in coloured else "") for name, cell in cells])
    names = sum(column.name in summary.NAMES for column in columns)
    return tables(columns, rows, names, width)


def _phases(comparison: Comparison, width: int) -> Iterator[Table]:
    """Milliseconds of each phase, ``-`` where it holds no work; and what is not in the step time: the first step, and
    the seconds in which the backend was made, with builds and compilation."""
    phases = phases_of(entry.run for entry in comparison.finished)
    heads = {"ms in phase": TEXT, **dict.fromkeys((*phases, "clock's cost", "first step", "set-up s"), "1")}
    columns = [Column[Entry]("", unit, "", lambda _: None, heading) for heading, unit in heads.items()]
    rows = []
    for entry in comparison.finished:
        result = entry.run.finished
        times = result.phases.phase_ms
        cells = ["-" if (ms := times.get(phase)) is None else short(ms) for phase in phases]
        clock = "-" if WHOLE_STEP in times else clocks_cost(entry)
        first, set_up = short(result.training.first_step_ms), f"{result.set_up.construct_s:.2g}"
        rows.append([entry.label, *cells, clock, first, set_up])
    return tables(columns, rows, 1, width)


def inference_tables(comparison: Comparison, width: int) -> Iterator[Table]:
    """A row for each way of each run. Costs that a race measured once stand in the rows of its first run only."""
    sizes: dict[str, None] = {}
    rows, labelled = [], None
    for row in inference.rows_of(comparison):
        label, *cells = (column.cell(row) if row.shows(column) else "" for column in inference.SHOWN)
        rows.append(["" if row.entry is labelled else label, *cells])
        labelled = row.entry
        sizes[str(inference.batch_size(row.entry))] = None
    first, *others = inference.SHOWN
    columns = [replace(first, heading=f"inference, batch {'/'.join(sizes)}"), *others]
    return tables(columns, rows, len(inference.NAMES), width)


def tables(columns: Sequence[Column[Any]], rows: Sequence[Cells], names: int, width: int) -> Iterator[Table]:
    """Yields one table, or several where a console of so many characters is too narrow for one: the columns come with
    the most important first. The first ``names`` columns name a row, and each table begins with these."""
    each = zip(columns, *rows, strict=True)
    sizes = [max(_size(cell, column.wraps) for cell in (column.heading, *cells)) for column, *cells in each]
    named = list(range(names))
    parts: list[list[int]] = [[]]  # the columns of each table
    for at in range(names, len(columns)):
        if parts[-1] and sum(sizes[each] + GAP for each in [*named, *parts[-1], at]) - GAP + EDGES > width:
            parts.append([])
        parts[-1].append(at)
    for chosen in parts:
        table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
        for column in (columns[at] for at in [*named, *chosen]):
            table.add_column(column.heading, justify=column.justify, no_wrap=not column.wraps)
        for row in rows:
            if any(str(row[at]) for at in chosen):  # a row that shows nothing but its names is left out
                table.add_row(*(row[at] for at in [*named, *chosen]))
        yield table


def _size(cell: str | Text, wraps: bool) -> int:
    """Returns the characters that a cell needs. A cell that may have two lines needs half, or its longest word."""
    text = str(cell)
    return max(cell_len(text) // 2 + 1, *map(cell_len, text.split())) if wraps and text else cell_len(text)
