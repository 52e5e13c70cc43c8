from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import pytest

from mpcompare.errors import InputError
from mpcompare.typed import check_type, is_of


class AtLeast(TypedDict):
    a: int


@dataclass(frozen=True)
class Part:
    a: dict[str, int]
    b: int | None = None


class Table(AtLeast, total=False):
    b: list[float | None]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, float), (1.5, float), ("nan", float), (0, int), (True, bool), ("", str), (None, int | None), ({}, Any),
        ({"x": {"y": 1}}, dict[str, dict[str, int]]), ({"a": 1, "c": ()}, Table), ({"a": 1, "b": [None, 2]}, Table),
        ({"a": {}}, Part), ({"a": {"x": 1}, "b": 2, "c": ()}, Part), ([{"a": {}}], list[Part]),
    ],
)  # fmt: skip
def test_values_of_their_types_pass(value, expected):
    check_type("it", value, expected)
    assert is_of(value, expected)


@pytest.mark.parametrize(
    ("value", "expected", "said"),
    [
        (True, int, "it=True: expected a whole number"),
        (2**63, float, "it=9223372036854775808: expected a number"),
        ("1", float, "it='1': expected a number"),
        ("inf", int, "it='inf': expected a whole number"),
        (5, dict[str, str], "it=5: expected a table"),
        ({"x": 5}, dict[str, str], "it.x=5: expected a text"),
        ({5: "x"}, dict[str, str], "it, a key=5: expected a text"),
        ({"clap": 1.0}, dict[Literal["clip", "step"], float], "it, a key=clap: expected one of clip, step"),
        (5, Literal["clip", "step"], "it=5: expected a text"),
        ({"b": []}, Table, "it.a=: expected a whole number, there is none"),
        ({"a": 1, "b": [1, "x"]}, Table, "it.b[1]='x': expected a number"),
        ({"b": 1}, Part, "it.a=: expected a table, there is none"),
        ({"a": {}, "b": "x"}, Part, "it.b='x': expected a whole number"),
        (5, Part | None, "it=5: expected a table"),
        ("x" * 99, int | None, f"it='{'x' * 59}...: expected a whole number"),
    ],
)
def test_the_part_that_is_wrong_is_named(value, expected, said):
    with pytest.raises(InputError) as refused:
        check_type("it", value, expected)
    assert str(refused.value) == said
    assert not is_of(value, expected)
