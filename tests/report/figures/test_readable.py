"""Any reader can tell runs apart, and no figure names a folder of the machine that drew it."""

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from support.marks import slow_after
from support.records import MEASURED, write_run

from mpcompare.foreign import without_folders
from mpcompare.report.comparison import compare
from mpcompare.report.contents import Report
from mpcompare.report.figures import kit
from mpcompare.report.figures.registry import FIGURES
from mpcompare.report.report import contents_of
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


@pytest.fixture(scope="module")
def long_names(tmp_path_factory):
    """Returns the report on 13 runs with long names, one of which is the baseline."""
    folder = tmp_path_factory.mktemp("runs")
    kinds = ("clips_each_micro_batch", "constants_in_bf16", "scheduler_counts_micro_batches")
    names = [f"real/{kind}_{place}" for place in range(5) for kind in kinds][:13]
    for place, name in enumerate(names):
        losses = (2.0, 1.9 + place / 100, 1.8 + place / 100)
        write_run(folder / f"{place:02}", name, "fp16", losses=losses, race=None, **MEASURED)
    return contents_of([folder], names[2])


@pytest.mark.parametrize("name", slow_after(3, ["glance", "noise", "step_time", "loss", "phases", "memory"]))
@pytest.mark.filterwarnings("error")
def test_long_names_are_within_the_canvas_and_leave_room_for_the_panels(long_names, name):
    figure = FIGURES[name](long_names)
    figure.draw_without_rendering()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert (box.x0 >= 0, box.y0 >= 0, box.x1 <= width, box.y1 <= height) == (True,) * 4
    assert all(axes.bbox.width > 200 and axes.bbox.height > 100 for axes in figure.axes)
    left, *right = sorted((axes.xaxis.label.get_window_extent() for axes in figure.axes), key=lambda label: label.x0)
    assert name != "glance" or left.x1 < right[0].x0


def test_every_figure_has_a_title():
    assert all(figure.title and figure.reading for figure in FIGURES.values())
