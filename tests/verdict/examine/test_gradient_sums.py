"""The gradients of a replay, which are summed."""

from collections import Counter

import torch

from mpcompare.verdict.examine.forced.gradient_sums import GradientSums


def test_a_part_is_alone_if_no_other_comes_before_or_after_it():
    sums = GradientSums(Counter(once=1, twice=2, between=1), ["between"], lambda part: part)
    assert [sums.is_alone(name) for name in ("once", "twice", "between")] == [True, False, False]
    sums.add("twice", torch.ones(1), "layer")
    sums.counted("twice")
    assert not sums.is_alone("twice")
