"""The figure of the loss."""

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


def test_of_many_runs_each_has_a_panel_of_its_own(tmp_path):
    write_run(tmp_path / "00", "amp", losses=(2.0, 1.0, 0.5))
    for place in range(1, 24):
        write_run(tmp_path / f"{place:02}", f"b{place:02}", losses=(2.0, 1.0 + place / 100, float("nan")))
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    axes = [each for each in loss_figure.loss(Report([comparison], "amp")).axes if each.axison]
    assert [each.get_title() for each in axes] == [f"b{place:02} bf16" for place in range(1, 24)]
    for place, each in enumerate(axes, start=1):
        own, lost = each.lines[-2:]
        assert own.get_ydata()[1] == pytest.approx(place / 100)
        assert lost.get_xdata().tolist() == [3]
        assert len(each.lines) == 23 + 2
