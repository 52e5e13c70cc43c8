"""The figure of scales draws the traces."""

import math

import pytest
from support.scalers import all_by_policy, by_policy

from mpcompare.scalers.figure import BEHIND, THRESHOLD, scales
from mpcompare.scalers.overflows import OverflowStep, of_pattern


def curve(axes, colour):
    """Returns the heights of the line of this colour, one a step."""
    (line,) = [each for each in axes.lines if each.get_color() == colour and each.get_linestyle() == "-"]
    return list(line.get_ydata())[:-1]


def test_each_scaler_has_a_panel_with_its_scales_and_torchs_behind():
    steps = of_pattern("..x....xx..")
    traces = all_by_policy(steps, init_scale=1024.0, growth_interval=4)
    figure = scales(traces, steps, "a title")
    for axes, trace in zip(figure.axes, traces, strict=True):
        assert axes.get_title(loc="left").startswith(trace.name)
        title_colour = axes.title.get_color() if axes.get_title() else axes._left_title.get_color()
        assert curve(axes, title_colour) == [math.log2(step.before) for step in trace.steps]
        marks = [line for line in axes.lines if line.get_marker() == "x"]
        assert list(marks[0].get_xdata()) == [3, 8, 9]
    for axes in figure.axes[1:]:
        assert curve(axes, BEHIND) == [math.log2(step.before) for step in traces[0].steps]
    assert figure.axes[3].get_title(loc="left").startswith("flax, from step 7 unlike torch: counts late")


@pytest.mark.parametrize(("thresholds", "word"), [([8.0, 2.0, 0.0], True), ([], False)])
def test_thresholds_are_drawn_where_they_are_known(thresholds, word):
    steps = [OverflowStep(t, math.nextafter(t, math.inf)) for t in thresholds] or of_pattern("...")
    figure = scales([by_policy("torch", steps)], steps, "")
    (dots,) = [line for line in figure.axes[0].lines if line.get_color() == THRESHOLD]
    assert [y for y in dots.get_ydata() if not math.isnan(y)] == ([3.0, 1.0] if word else [])
    assert ("largest finite scale" in [text.get_text() for text in figure.legends[0].get_texts()]) == word


def test_a_scale_of_0_leaves_a_gap_and_the_end_by_error_has_a_mark():
    steps = of_pattern("x" * 180)
    figure = scales([by_policy(name, steps) for name in ("torch", "deepspeed")], steps, "")
    assert math.isnan(figure.axes[0].lines[1].get_ydata()[-1])
    (square,) = [line for line in figure.axes[1].lines if line.get_marker() == "s"]
    assert list(square.get_xdata()) == [len(by_policy("deepspeed", steps).steps)]
