"""The figures of time."""

import pytest
from support.records import WHOLE, write_run

from mpcompare.phases import PHASES, WHOLE_STEP
from mpcompare.report.comparison import compare
from mpcompare.report.contents import Report
from mpcompare.report.figures.times import COLOURS, phases, step_time
from mpcompare.report.runs import find_runs


def drawn(folder):
    return phases(Report(compare(find_runs([folder]), "amp"), "amp"))


def test_phases_are_stacked_and_a_whole_step_is_one_of_its_own(tmp_path):
    write_run(tmp_path / "0", "graph", **WHOLE)
    write_run(tmp_path / "1", "amp", phase_overhead=0.25)
    write_run(tmp_path / "2", "other", phase_ms={"forward": 4.0, "backward": 3.0, "unscale": None, "step": None})
    figure = drawn(tmp_path)
    (axes,) = figure.axes
    ends = [text.get_text() for text in axes.texts if "ms" in text.get_text()]
    assert ends == ["7.5 ms", "10 ms (clock +25.0 %)", "7 ms (clock in the noise)"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["forward", "backward", "step", "update", "whole step"]


def test_every_phase_has_its_place_and_a_colour_of_its_own(tmp_path):
    assert tuple(COLOURS) == (*PHASES, WHOLE_STEP)
    assert len(set(COLOURS.values())) == len(COLOURS)
    write_run(tmp_path / "0", "graph", **WHOLE)
    write_run(tmp_path / "1", "amp", phase_ms=dict.fromkeys(PHASES, 1.0))
    figure = drawn(tmp_path)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert sorted(text.get_text() for text in legend.get_texts()) == sorted(COLOURS)
    box = legend.get_window_extent()
    assert (box.x0 > 0, box.x1 < figure.bbox.x1, box.y0 > 0) == (True,) * 3
    bars = {bars.get_label(): bars for bars in figure.axes[0].containers}
    lefts = [bars[phase][0].get_x() for phase in PHASES]
    assert lefts == sorted(lefts)


def test_a_piece_has_its_number_only_where_there_is_room_for_it(tmp_path):
    write_run(tmp_path / "0", "amp", phase_ms={"forward": 80.0, "backward": 70.0, "step": 10.0})
    write_run(tmp_path / "1", "quick", phase_ms={"forward": 20.0, "backward": 15.0, "step": 6.0})
    (axes,) = drawn(tmp_path).axes
    assert [text.get_text() for text in axes.texts if "ms" not in text.get_text()] == ["80", "70", "20"]


@pytest.mark.slow
@pytest.mark.parametrize("runs", [12, 1, 3])
def test_the_labels_of_the_axes_are_not_cut_off(tmp_path, runs):
    for place in range(runs):
        write_run(tmp_path / f"{place}", f"mistake/backend_{place}" if place else "amp")
    report = Report(compare(find_runs([tmp_path]), "amp"), "amp")
    for figure in (step_time(report), phases(report)):
        figure.draw_without_rendering()
        box = figure.axes[0].xaxis.label.get_window_extent()
        assert (box.x0 > 0, box.x1 < figure.bbox.x1, box.y0 > 0) == (True,) * 3
