"""The figure of the training steps has a panel for each column that a run has, and no other."""

import math
from dataclasses import replace

import pandas as pd
import pytest
from support.marks import slow_rows
from support.records import result_of

from mpcompare.records import MONITORED
from mpcompare.report.comparison import Comparison, Entry
from mpcompare.report.contents import Report
from mpcompare.report.figures.kit import COLOURS
from mpcompare.report.figures.training import training
from mpcompare.report.runs import Run

PLAIN = {"warmup": [True, False, False, False], "loss": 1.0, "lr": 0.1, "loss_scale": 1.0, "skipped": False,
         "grad_norm": math.nan, "clipped": False, **dict.fromkeys(MONITORED, math.nan)}  # fmt: skip


def comparison(*runs, clip_norm=None):
    entries = []
    for place, columns in enumerate(runs):
        steps = pd.DataFrame({"step": [1, 2, 3, 4], **PLAIN, **columns})
        result = result_of(config={"task": {"clip_norm": clip_norm}})
        run = Run(None, str(place), result, steps, pd.DataFrame())
        entries.append(Entry(run, f"run {place}", "", None))
    return Comparison("title", "data", entries=entries)


def drawn(*comparisons):
    return training(Report(comparisons, "amp"))


def labels(*comparisons):
    return [axes.get_ylabel().replace("\n", " ") for axes in drawn(*comparisons).axes if axes.axison]


@pytest.mark.parametrize(
    ("columns", "panel"),
    [
        ({"lr": [0.1, 0.2, 0.3, 0.4]}, "learning rate"),
        ({"grad_norm": [1.0, 2.0, math.inf, math.nan]}, "norm of the gradients"),
        *slow_rows(
            [
                ({"loss_scale": 8.0}, "loss scale"),
                ({"grad_zero": [math.nan, 0.5, math.nan, 0.25]}, "gradients that are 0 in %"),
                ({"grad_subnormal": [math.nan, 0.5, math.nan, 0.0]}, "gradients that are subnormal in %"),
                ({"grad_nonfinite": [math.nan, 0.0, math.nan, 1e-7]}, "gradients that are inf or NaN in %"),
                ({"lost_updates": [math.nan, 1.0, math.nan, 1.0]}, "updates that are lost in %"),
            ]
        ),
    ],
)
def test_a_panel_is_drawn_for_what_any_run_has(tmp_path, columns, panel):
    assert labels(comparison({}, columns)) == [panel]
    drawn(comparison({}, columns), comparison({})).savefig(tmp_path / "training.png")
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_is_drawn_where_nothing_happened():
    assert drawn(comparison({}, {})) is None


def test_runs_without_the_columns_are_drawn_as_runs_that_have_none():
    bare = comparison({"loss_scale": 8.0})
    for name in ("lr", "grad_norm", "warmup", *MONITORED):
        del bare.entries[0].run.steps[name]
    assert labels(bare) == ["loss scale"]


def test_the_loss_scale_of_runs_that_scale_and_their_skipped_steps():
    scaled = {"loss_scale": [8.0, 4.0, 4.0, 8.0], "skipped": [True, False, False, True]}
    (axes,) = drawn(comparison({}, scaled)).axes
    curve, skipped = axes.lines  # the other has none
    assert curve.get_label() == "run 1"
    assert curve.get_color() == skipped.get_color() == COLOURS[1]  # as in every figure
    assert curve.get_ydata().tolist() == [8, 4, 4, 8]
    assert (skipped.get_xdata().tolist(), skipped.get_ydata().tolist()) == ([1, 4], [8, 8])
    assert "x: skipped" in axes.get_xlabel()


def test_a_norm_that_is_no_number_is_marked_and_the_limit_is_drawn():
    norms = {"grad_norm": [2.0, math.inf, 4.0, math.nan]}
    (axes,) = drawn(comparison(norms, clip_norm=3.0)).axes
    curve, triangle, limit = axes.lines
    assert (curve.get_xdata().tolist(), curve.get_ydata().tolist()) == ([1, 3], [2, 4])
    assert triangle.get_xdata().tolist() == [2]
    assert list(limit.get_ydata()) == [3.0, 3.0]
    assert "triangle: inf" in axes.get_xlabel()


def test_a_single_step_is_a_mark_and_the_warm_up_is_that_of_any_run():
    one = comparison({"grad_norm": 2.0}, {"grad_norm": 3.0})
    for place, entry in enumerate(one.entries):
        steps = entry.run.steps[:1].assign(step=1000, warmup=place == 1)
        one.entries[place] = replace(entry, run=replace(entry.run, steps=steps))
    (axes,) = drawn(one).axes
    assert [line.get_ydata().tolist() for line in axes.lines if line.get_marker() == "o"] == [[2], [3]]
    assert [patch.get_x() for patch in axes.patches] == [999.5]
    assert axes.get_xlabel() == "step   (grey: warm-up)"


def test_what_never_was_is_said_in_lines_that_fit():
    figure = drawn(
        comparison({"loss_scale": 8.0, "skipped": True, "grad_norm": math.inf, **dict.fromkeys(MONITORED, 0.0)})
    )
    figure.draw_without_rendering()
    label = figure.axes[-1].xaxis.label
    assert "no updates that are lost" in label.get_text().replace("\n", " ")
    box = label.get_window_extent()
    assert (box.x0 > 0, box.x1 < figure.bbox.x1) == (True, True)


def test_shares_are_percents_of_the_monitored_steps_and_what_never_was_is_said():
    seen = {"grad_zero": [math.nan, 0.5, math.nan, 0.25], "grad_nonfinite": [math.nan, 0.0, math.nan, 0.0]}
    (axes,) = drawn(comparison(seen)).axes
    (curve,) = axes.lines
    assert (curve.get_xdata().tolist(), curve.get_ydata().tolist()) == ([2, 4], [50, 25])
    assert curve.get_marker() == "o"
    assert axes.get_xlabel().endswith("\nno gradients that are inf or NaN")
