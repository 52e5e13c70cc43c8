"""The brief table: the columns of a run that matter in a document. ``summary.md`` and ``summary.tex`` show it."""

from collections.abc import Sequence
from dataclasses import replace

from mpcompare.report import summary
from mpcompare.report.columns import Column
from mpcompare.report.comparison import Row

LONGEST = 240  # characters of a text that somebody else wrote, such as an error


def columns_of(rows: Sequence[Row]) -> list[Column[Row]]:
    """Returns the columns, without the variant and the accuracy where no run has one. Their headings name the baseline
    where all runs have the same one."""
    labels = {row.comparison.label(row.entry.baseline) for row in rows if row.entry.baseline}
    versus = labels.pop() if len(labels) == 1 else "baseline"
    optional = ("variant", "test_accuracy")
    return [
        replace(column, heading=one_line(column.heading.format(baseline=versus)))
        for column in summary.BRIEF
        if column.name not in optional or any(column.value(row) is not None for row in rows)
    ]


def cells(columns: Sequence[Column[Row]], row: Row) -> list[str]:
    """Returns the cells of a run; of one that did not finish its name, and its status in place of the verdict."""
    return [one_line(summary.cell(column, row)) for column in columns]


def one_line(text: str, longest: int = LONGEST) -> str:
    """Returns a text without line breaks and characters that cannot be printed, cut where it is longer."""
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return line if len(line) <= longest else f"{line[: longest - 3]}..."
