"""The figure of the formats' numbers draws what torch has."""

import math

import pytest
import torch
from matplotlib.collections import LineCollection

from mpcompare.pitfalls.figure import DRAWN, formats
from mpcompare.pitfalls.grid import smallest


def test_all_formats_stand_in_it_with_their_numbers():
    figure = formats()
    ranges, gaps, numbers, binade = figure.axes
    labels = ["fp32", "bf16", "fp16", "fp8 e5m2", "fp8 e4m3"]
    for axes in (ranges, numbers, binade):
        assert [label.get_text() for label in axes.get_yticklabels()] == labels
    assert all(axes.get_xlabel() and axes.get_title(loc="left") for axes in figure.axes)
    texts = [text.get_text() for text in binade.texts]
    assert texts == [f"{2**bits:,}" for bits in (23, 7, 10, 2, 3)]
    assert [text.get_text() for text in ranges.texts][1::2][2:] == ["65,504", "57,344", "448"]
    drawn = [len(c.get_segments()) for c in binade.collections if isinstance(c, LineCollection)]
    assert drawn == [2**bits + 1 for bits in (7, 10, 2, 3)]  # 2 itself included; fp32 is a bar
    assert len(gaps.texts) == len(labels)


@pytest.mark.slow
def test_relative_gaps_are_flat_among_normal_numbers_and_1_at_the_smallest():
    gaps = formats().axes[1]
    curves = {line.get_label(): line.get_xydata() for line in gaps.lines if len(line.get_xdata()) > 1}
    for label, dtype in DRAWN.items():
        powers, relative = curves[label].T
        normal = powers >= math.log2(torch.finfo(dtype).smallest_normal)
        assert set(relative[normal]) == {math.log2(torch.finfo(dtype).eps)}
        assert (powers[0], relative[0]) == (math.log2(smallest(dtype)), 0.0)
