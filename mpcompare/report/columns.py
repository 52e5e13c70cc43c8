"""The columns of tables: each is defined once, for every output that shows it."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from mpcompare.numerals import short

R = TypeVar("R")  # a row of the table

TEXT = "text"
YES_NO = "yes or no"
LONGEST = 240  # characters of a text that somebody else wrote, such as an error


@dataclass(frozen=True)
class Column(Generic[R]):
    """A column of a table."""

    name: str  # the heading in a CSV file
    unit: str  # the unit of the values; ``1`` for ratios and counts, ``TEXT`` for words, ``YES_NO`` for truth values
    meaning: str  # a sentence for somebody who reads the file
    value: Callable[[R], Any]  # returns the value of a row; None is an empty cell
    # the heading on a console, in which ``{baseline}`` stands for the label of the baseline; empty where a console does
    # not show the column
    heading: str = ""
    # returns what a console shows of a row and its value
    text: Callable[[R, Any], str] = lambda _, value: "" if value is None else str(value)
    wraps: bool = False  # whether a console may break the heading and the cells into lines
    # whether CSV files have the column; a column that repeats other columns' values is for a console alone
    in_files: bool = True

    @property
    def justify(self) -> Literal["left", "right"]:
        """The side at which cells begin: words at the left, numbers at the right."""
        return "left" if self.unit == TEXT else "right"

    def cell(self, row: R) -> str:
        """Returns the text of a cell on a console."""
        return self.text(row, self.value(row))


def recorded(name: str, unit: str, meaning: str, **shown: Any) -> Column[Any]:
    """Returns the column of a value that a record has under the same name, for rows that have a ``recorded``. ``shown``
    is the part of it that a console shows, as in :class:`Column`."""
    return Column(name, unit, meaning, lambda row: row.recorded.get(name), **shown)


# The columns that name the run of a row, for rows that have its ``comparison`` and its ``entry``.
OF_RUN: tuple[Column[Any], ...] = (
    Column("comparison", TEXT, "The title of the comparison.", lambda row: row.comparison.title),
    Column("run", TEXT, "The folder of the run.", lambda row: row.entry.run.name),
    Column("label", TEXT, "The label of the run in its comparison.", lambda row: row.entry.label, heading="run"),
)


def number(spec: str = "", per: float = 1.0) -> Callable[[object, Any], str]:
    """Returns a :attr:`Column.text` that formats values, divided by ``per``; ``-`` for None. Without a ``spec`` they
    have four digits.

    Values may be the words ``inf`` and ``nan``, which stand for numbers in a record.
    """

    def text(_: object, value: Any) -> str:
        if value is None:
            return "-"
        return format(float(value) / per, spec) if spec else short(float(value) / per)

    return text


def percentiles(name: str, meaning: str) -> Column[Any]:
    """Returns the column of a recorded time's 20th to 80th percentile in ms: ``name_p20`` and ``name_p80`` of the
    record together, for a console alone."""
    ends = (f"{name}_p20", f"{name}_p80")
    return Column(
        f"{name}_p20_p80",
        "ms",
        meaning,
        lambda row: tuple(map(row.recorded.get, ends)),
        heading="p20 - p80",
        # a single block has no percentiles
        text=lambda row, ends: "-" if ends[0] == ends[1] else " - ".join(number()(row, end) for end in ends),
        in_files=False,
    )


def one_line(text: str, longest: int = LONGEST) -> str:
    """Returns a text without line breaks and characters that cannot be printed, cut where it is longer."""
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return line if len(line) <= longest else f"{line[: longest - 3]}..."


def percent(difference: float) -> str:
    """``+1.5 %``; ``-`` for nan. Never -0.0."""
    return "-" if math.isnan(difference) else f"{round(100 * difference, 1) + 0.0:+.1f} %"


def named(columns: Iterable[Column[R]], names: str) -> tuple[Column[R], ...]:
    """Returns the columns with these names, which spaces part, in the order of the names."""
    by_name = {column.name: column for column in columns}
    return tuple(by_name[name] for name in names.split())


def values(columns: Iterable[Column[R]], row: R) -> dict[str, Any]:
    """Returns a row of a CSV file: the values by the names of their columns."""
    return {column.name: column.value(row) for column in columns if column.in_files}
