"""Sums of micro-batches that are named by their counts."""

import math

import pytest

from mpcompare.verdict.findings import MicroBatches
from mpcompare.verdict.judge.accumulation import wrong_sum


@pytest.mark.parametrize(
    ("counts", "rest", "says"),
    [
        ([1.0, 1.01], 0.1, ""),
        ([2.0, 2.0], 0.1, "every micro-batch counts 2 times: the loss is not divided by task.accumulate"),
        ([0.5, 0.5], 0.1, "every micro-batch counts 0.5 times: divided by it twice"),
        ([3.0, 3.0], 0.1, ""),  # gradients are scaled, and not by their number
        ([0.0, 1.0], 0.1, "the micro-batches count 0, 1 times, where each counts once"),
        ([0.0, 1.0], 5.0, ""),  # something else is wrong
        ([0.9, 1.1], 0.1, ""),  # rounding errors may make this
        ([math.nan, 1.0], 0.1, ""),
    ],
)
def test_sums_of_micro_batches_are_named_only_where_the_counts_tell(counts, rest, says):
    assert wrong_sum(MicroBatches(counts, rest, smallest=1.0), limit=0.1) == says
