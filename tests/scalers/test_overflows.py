"""The steps of a pattern, a file of thresholds and a recorded run."""

import math

import pytest

from mpcompare.errors import InputError
from mpcompare.records import COLUMNS, STEPS
from mpcompare.scalers.overflows import FINITE, OVERFLOW, of_pattern, of_run, of_thresholds


def recorded(folder, rows):
    """Writes the steps of a run: its scale in each, and whether it was skipped."""
    lines = [",".join(COLUMNS[STEPS])]
    for number, (scale, skipped) in enumerate(rows, start=1):
        values = {"step": number, "loss_scale": scale, "skipped": skipped}
        lines.append(",".join(str(values.get(field, "")) for field in COLUMNS[STEPS]))
    (folder / "steps.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("scale", [0.0, 1.0, 2.0**127, math.inf])
def test_a_pattern_overflows_or_not_whatever_the_scale(scale):
    assert [step.overflows(scale) for step in of_pattern("x.x")] == [True, False, True]
    assert not FINITE.is_unknown(scale)
    assert not OVERFLOW.is_unknown(scale)


def test_a_threshold_is_the_largest_finite_scale(tmp_path):
    file = tmp_path / "thresholds.txt"
    file.write_text("# of a run\n65536\n\n1024.5  # a comment\n0\ninf\n")
    steps = of_thresholds(file)
    assert [step.overflows(65536.0) for step in steps] == [False, True, True, False]
    assert [step.overflows(65537.0) for step in steps] == [True, True, True, False]
    assert [step.overflows(1024.5) for step in steps] == [False, False, True, False]
    assert not any(step.is_unknown(scale) for step in steps for scale in (1.0, 65536.0, math.inf))


def test_a_run_tells_of_smaller_scales_where_it_was_finite_and_of_larger_ones_where_it_overflowed(tmp_path):
    (good, skipped), first = of_run(recorded(tmp_path, [(1024.0, False), (2048.0, True)]))
    assert first == 1024
    assert [good.overflows(scale) for scale in (512, 1024, 2048)] == [False, False, False]
    assert [good.is_unknown(scale) for scale in (512, 1024, 2048)] == [False, False, True]
    assert [skipped.overflows(scale) for scale in (1024, 2048, 4096)] == [True, True, True]
    assert [skipped.is_unknown(scale) for scale in (1024, 2048, 4096)] == [True, False, False]


def test_a_run_whose_scale_stayed_at_1_and_that_skipped_a_step_is_taken(tmp_path):
    (skipped, good), first = of_run(recorded(tmp_path, [(1.0, True), (1.0, False)]))
    assert (first, skipped.overflows(1.0), good.overflows(1.0)) == (1.0, True, False)


def test_a_run_may_be_named_by_its_file_of_steps(tmp_path):
    recorded(tmp_path, [(1024.0, False)])
    assert of_run(tmp_path / "steps.csv") == of_run(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1024\nmany\n", "line 2 is 'many': expected a loss scale, 0 or inf"),
        ("nan\n", "line 1 is 'nan'"),
        ("-1\n", "line 1 is '-1'"),
        ("# nothing\n\n", "holds no number"),
    ],
)
def test_a_file_that_holds_no_thresholds_is_named(tmp_path, text, message):
    file = tmp_path / "thresholds.txt"
    file.write_text(text)
    with pytest.raises(InputError, match=f"--thresholds={file}: {message}"):
        of_thresholds(file)


def test_runs_without_a_loss_scale_or_steps_are_refused(tmp_path):
    with pytest.raises(InputError, match="cannot read it"):
        of_run(tmp_path)
    with pytest.raises(InputError, match="this run scaled no loss"):
        of_run(recorded(tmp_path, [(1.0, False), (1.0, False)]))
    (tmp_path / "steps.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="expected the folder of a run"):
        of_run(tmp_path)
    recorded(tmp_path, [("", False)])
    with pytest.raises(InputError, match="a row without a loss scale"):
        of_run(tmp_path)


@pytest.mark.parametrize("kept", ["3,False", "3,False,0.5,0.1,2048.0,Tr"])
def test_a_last_row_that_was_cut_off_is_no_step(tmp_path, kept):
    whole = of_run(recorded(tmp_path, [(1024.0, False), (2048.0, True)]))
    with (tmp_path / "steps.csv").open("a") as file:
        file.write(kept)
    assert of_run(tmp_path) == whole
