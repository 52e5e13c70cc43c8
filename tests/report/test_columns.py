"""The columns of the tables have a unit, a meaning, and a place on the console."""

import math

import pytest

from mpcompare.report import dtypes, inference, summary
from mpcompare.report.columns import Column, number, percent, values

TABLES = {"summary": summary.COLUMNS, "inference": inference.COLUMNS, "dtypes": dtypes.COLUMNS}


@pytest.mark.parametrize("table", TABLES)
def test_columns_are_named_once_and_explained(table):
    columns = TABLES[table]
    assert len({column.name for column in columns}) == len(columns)
    for column in columns:
        assert column.unit
        assert column.meaning[0].isupper()
        assert column.meaning.endswith(".")


@pytest.mark.parametrize("table", [summary, inference])
def test_a_column_with_a_heading_has_its_place_on_the_console(table):
    assert {column.name for column in table.SHOWN} == {column.name for column in table.COLUMNS if column.heading}


def test_files_and_consoles_show_one_value():
    columns = [
        Column("memory", "bytes", "The memory.", lambda row: row["bytes"], heading="MB", text=number(".2f", per=1e6)),
        Column("word", "text", "A word.", lambda row: row.get("word"), heading="word"),
        Column("both", "text", "Both.", lambda row: None, heading="both", in_files=False),
    ]
    row = {"bytes": 1_500_000}
    assert values(columns, row) == {"memory": 1_500_000, "word": None}
    assert [column.cell(row) for column in columns] == ["1.50", "", ""]
    assert [column.justify for column in columns] == ["right", "left", "left"]


def test_a_number_may_be_missing_or_a_word_of_a_record():
    assert [number(".2f")(None, value) for value in (None, "inf", "nan", 2)] == ["-", "inf", "nan", "2.00"]


def test_percent_has_no_negative_zero():
    assert [percent(x) for x in (-1e-9, 0.0051, -0.5, math.nan)] == ["+0.0 %", "+0.5 %", "-50.0 %", "-"]
