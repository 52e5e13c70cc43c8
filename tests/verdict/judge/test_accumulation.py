"""Sums of micro-batches that are named by their counts."""

import math

import pytest

from mpcompare.verdict.judge.accumulation import MicroBatches, wrong_sum


@pytest.mark.parametrize(
    ("counts", "rest", "says"),
    [
        ([1.0, 1.01], 0.1, ""),
        ([2.0, 2.0], 0.1, "every micro-batch counts 2 times: the loss is not divided by task.accumulate"),
        ([0.5, 0.5], 0.1, "every micro-batch counts 0.5 times: divided by it twice"),
        ([3.0, 3.0], 0.1, ""),  # gradients are scaled, and not by the number of micro-batches
        ([0.0, 1.0], 0.1, "of 2 micro-batches only 2 counts"),
        ([0.0, 1.0], 5.0, ""),  # something else is wrong
        ([0.9, 1.1], 0.1, ""),  # rounding errors may make this
        ([math.nan, 1.0], 0.1, ""),
    ],
)
def test_sums_of_micro_batches_are_named_only_where_the_counts_tell(counts, rest, says):
    assert wrong_sum(MicroBatches(counts, rest, smallest=1.0, weights=[1.0, 1.0]), limit=0.1) == says


@pytest.mark.parametrize(
    ("counts", "weights", "says"),
    [
        ([1.26, 0.84], [0.8, 1.2], "the micro-batches count alike, where their shares of the labels are 0.4, 0.6"),
        ([1.0, 1.0], [0.8, 1.2], ""),
        ([1.0, 1.0], [1.0, 1.0], ""),
        ([0.5, 1.5], [0.8, 1.2], "the micro-batches count 0.5, 1.5 times, where each counts once"),
        ([1.0, 1.0], [0.0, 2.0], ""),
    ],
)
def test_a_mean_of_means_is_named_where_the_shares_of_the_labels_tell(counts, weights, says):
    found = wrong_sum(MicroBatches(counts, 0.1, smallest=2.0, weights=weights), limit=0.1)
    assert found == (f"{says}: a mean of means" if "alike" in says else says)
