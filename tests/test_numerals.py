"""Numbers as they are printed."""

import math

import pytest

from mpcompare.numerals import as_ratio, short


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (58043.7, "58044"), (9999.7, "10000"), (626601.0, "626601"), (12.3456, "12.35"), (0.1 + 0.2, "0.3"),
        (0.0060142, "0.006014"), (1e-5, "1e-05"), (0, "0"), (-58043.7, "-58044"), (3e38, "3e+38"),
        (math.inf, "inf"), (math.nan, "nan"),
    ],
)  # fmt: skip
def test_a_number_has_few_digits_and_all_before_the_point(value, text):
    assert short(value) == text


def test_a_loss_scale_is_written_in_full():
    assert short(2.0**24, 6) == "16777216"


def test_a_small_ratio_keeps_two_digits():
    assert [*map(as_ratio, (1.379, 0.0951, 0.0949, 0.00312, 0.0, math.nan))] == [
        "1.38", "0.10", "0.095", "0.0031", "0", "nan",
    ]  # fmt: skip
