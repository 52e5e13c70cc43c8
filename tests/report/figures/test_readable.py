"""Any reader can tell runs apart, and no figure names a folder of the machine that drew it."""

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from support.marks import slow_after
from support.records import write_run

from mpcompare.foreign import without_folders
from mpcompare.report.comparison import compare
from mpcompare.report.contents import Report
from mpcompare.report.figures import kit
from mpcompare.report.figures.registry import FIGURES
from mpcompare.report.runs import find_runs


def test_42_runs_have_lines_and_dots_of_their_own():
    def looks(style):
        return len({(kit.colour(place), style(place)) for place in range(42)})

    assert looks(kit.dashes) == looks(kit.marker) == 42


def test_no_run_has_the_mark_of_values_beyond_an_axis():
    axes = Figure().subplots()
    kit.at_the_top(axes, [1.0], "black", 1.0)
    assert axes.lines[0].get_marker() not in {kit.marker(place) for place in range(42)}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("data=/home/anna/x.pt", "data=x.pt"),
        ("the folder /data/a/mnist is there", "the folder mnist is there"),
        ("~/mnist and /mnist", "mnist and /mnist"),
        ("~/data/mnist, C:\\Users\\me\\mnist", "mnist, mnist"),
        ("file:///srv/data/set.npz (asked for)", "set.npz (asked for)"),
        ("samples/s, ||g - exact|| / ||exact||, error / its limit, 3/4", ""),
        ("https://example.org/a/b", ""),
        ("a/b.c", ""),
    ],
)
def test_of_a_path_the_name_is_shown(text, shown):
    assert without_folders(text) == (shown or text)


@pytest.mark.slow
def test_no_figure_shows_a_folder(tmp_path):
    for place, backend in enumerate(("amp", "mine")):
        more = {"dataset_reason": "found in /home/anna/data/mnist", "options": {"cache": f"/home/anna/{backend}"}}
        write_run(tmp_path / f"{place}", backend, **more)
    write_run(tmp_path / "2", "mine", options={"cache": "/home/anna/other"})
    comparisons = compare(find_runs([tmp_path]), "amp")
    assert any("/home" in entry.label for entry in comparisons[0].entries)
    figures = [figure for draw in FIGURES.values() if (figure := draw(Report(comparisons, "amp")))]
    assert len(figures) > 3
    for figure in figures:
        figure.draw_without_rendering()
        assert not any("anna" in text.get_text() for text in figure.findobj(Text))


@pytest.mark.parametrize("last", slow_after(1, [1.0, float("nan")]))
def test_many_runs_without_a_difference_or_a_loss_are_drawn(tmp_path, last):
    for place in range(9):  # from the eighth on a run has marks
        write_run(tmp_path / f"{place}", f"backend_{place}", losses=[last if place == 8 else 1.0] * 3)
    report = Report(compare(find_runs([tmp_path]), "backend_0"), "backend_0")
    for draw in FIGURES.values():
        if figure := draw(report):
            figure.draw_without_rendering()


def test_every_figure_has_a_title():
    assert all(figure.title and figure.reading for figure in FIGURES.values())
