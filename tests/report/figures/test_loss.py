"""The figure of the loss."""

import math

import pytest
from support.records import write_run

from mpcompare.report.comparison import compare
from mpcompare.report.contents import Report
from mpcompare.report.figures import loss as loss_figure
from mpcompare.report.runs import find_runs


def test_what_was_evaluated_in_between_stands_next_to_the_training_loss(tmp_path):
    write_run(tmp_path / "0", "mine", evals=[(1, 2.5, 0.25), (3, 1.5, 0.5)])
    write_run(tmp_path / "1", "amp", evals=[(3, 1.25, 0.75)])  # only after training
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    figure = loss_figure.loss(Report([comparison], "amp"))
    loss, accuracy, _difference = figure.axes
    (held_out,) = (line for line in loss.lines if line.get_marker() == "s" and len(line.get_xdata()))
    (curve,) = accuracy.lines
    assert (held_out.get_xdata().tolist(), held_out.get_ydata().tolist()) == ([1, 3], [2.5, 1.5])
    assert (curve.get_xdata().tolist(), curve.get_ydata().tolist()) == ([1, 3], [0.25, 0.5])
    assert held_out.get_color() == curve.get_color() == loss.lines[0].get_color()
    assert "held-out loss" in [text.get_text() for text in figure.subfigs[0].legends[0].get_texts()]


@pytest.mark.parametrize("evals", [[], [(3, 1.5, 0.5)], [(1, 1.5, None), (3, 1.5, None)]])
def test_without_accuracies_in_between_there_is_no_panel_for_them(tmp_path, evals):
    write_run(tmp_path / "0", "amp", evals=evals)
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    assert [axes.get_ylabel() for axes in loss_figure.loss(Report([comparison], "amp")).axes] == [
        "training and held-out loss" if len(evals) > 1 else "training loss", "|loss - baseline's|",
    ]  # fmt: skip


@pytest.mark.parametrize(("losses", "seen"), [([2.0], [1]), ([1.5, math.nan, 2.0, math.nan, 1.0, 1.0], [1, 3])])
def test_a_loss_that_no_line_reaches_has_a_mark(tmp_path, losses, seen):
    write_run(tmp_path / "0", "amp", losses=losses)
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    figure = loss_figure.loss(Report([comparison], "amp"))
    figure.draw_without_rendering()
    above, below = figure.axes
    (marks,) = [line for line in above.lines if line.get_marker() == "o"]
    assert marks.get_xdata().tolist() == seen
    assert all(step.is_integer() for step in below.get_xticks())


def test_only_the_steps_of_the_warm_up_are_shaded(tmp_path):
    write_run(tmp_path / "0", "amp")
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    steps = comparison.entries[0].run.steps
    for first, shaded in ((1, [(0.5, 1.5)]), (1001, [])):  # the latter run goes on from a checkpoint
        steps["step"], steps["warmup"] = range(first, first + 3), [first == 1, False, False]
        above, _ = loss_figure.loss(Report([comparison], "amp")).axes
        assert [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in above.patches] == shaded
        assert above.get_xlim()[0] > first - 1


def test_of_many_runs_each_has_a_panel_of_its_own(tmp_path):
    write_run(tmp_path / "00", "amp", losses=(2.0, 1.0, 0.5))
    for place in range(1, 24):
        write_run(tmp_path / f"{place:02}", f"b{place:02}", losses=(2.0, 1.0 + place / 100, float("nan")))
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    axes = [each for each in loss_figure.loss(Report([comparison], "amp")).axes if each.axison]
    assert [each.get_title() for each in axes] == [f"b{place:02} bf16" for place in range(1, 24)]
    for place, each in enumerate(axes, start=1):
        own, mark, lost = each.lines[-3:]
        assert own.get_ydata()[1] == pytest.approx(place / 100)
        assert lost.get_xdata().tolist() == [3]
        assert mark.get_xdata().tolist() == [2]  # no line reaches it: the losses before are equal, and the next is NaN
        assert len(each.lines) == 23 + 3
