"""The file ``summary.csv``."""

import math

import pandas as pd
import pytest
from support.records import WHOLE, write_run

from mpcompare.report import summary
from mpcompare.report.comparison import compare
from mpcompare.report.contents import Report
from mpcompare.report.outputs import data
from mpcompare.report.report import report
from mpcompare.report.runs import find_runs

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.mark.slow
def test_summary_compares_with_the_baseline_step_by_step(tmp_path, capsys):
    write_run(tmp_path / "0", "mine", losses=(2.0, 1.25, 1.125), step_ms=5.0)
    write_run(tmp_path / "1", "amp", step_ms=10.0)
    assert report([tmp_path], tmp_path / "report", "amp")
    table = pd.read_csv(tmp_path / "report" / "summary.csv")
    required = ["backend", "engine", "precision", "dataset", "step_ms_p20", "step_ms_p50", "step_ms_p80",
                "time_vs_baseline", "peak_memory_bytes", "peak_memory_vs_baseline", "final_loss",
                "max_abs_loss_diff_vs_baseline", "test_accuracy"]  # fmt: skip
    assert list(table)[: len(required)] == required
    assert table["backend"].tolist() == ["mine", "amp"]
    assert table["time_vs_baseline"].tolist() == [0.5, 1.0]
    assert table["max_abs_loss_diff_vs_baseline"].tolist() == [0.25, 0.0]
    for name in ("loss", "step_time", "phases", "memory"):
        assert (tmp_path / "report" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "time / amp" in out
    assert "2.5e-01" in out
    assert f"Report: {tmp_path / 'report' / 'index.html'}\n" in out


@pytest.mark.slow
def test_a_failed_run_is_a_row_that_says_why(tmp_path, capsys):
    write_run(tmp_path / "0", "amp")
    write_run(tmp_path / "1", "mine", status="failed", losses=())
    write_run(tmp_path / "2", "gone", status="running", losses=(2.0,))
    assert not report([tmp_path], tmp_path / "report", "amp", formats=[])
    table = pd.read_csv(tmp_path / "report" / "summary.csv")
    assert table["status"].tolist() == ["ok", "failed", "running"]
    assert table["error"].tolist()[1:] == ["precision=fp16: no", "ended without a word: killed, or still running"]
    assert math.isnan(table["time_vs_baseline"][1])
    out = capsys.readouterr().out
    assert "mine bf16: failed: precision=fp16: no" in out
    assert "gone bf16: running: ended without a word" in out


@pytest.mark.slow
def test_a_loss_that_is_nan_is_not_no_difference(tmp_path, capsys):
    write_run(tmp_path / "0", "amp")
    write_run(tmp_path / "1", "mine", losses=(2.0, math.nan, 1.0))
    assert report([tmp_path], tmp_path / "report", "amp", formats=[])
    assert " nan " in capsys.readouterr().out
    assert (tmp_path / "report" / "summary.csv").read_text().splitlines()[2].split(",")[11] == "nan"


def test_whole_numbers_stay_whole_where_a_run_has_none(tmp_path):
    write_run(tmp_path / "0", "amp")
    write_run(tmp_path / "1", "mine", status="failed", losses=())
    data.summary_csv(Report(compare(find_runs([tmp_path]), "amp"), "amp"), tmp_path)
    table = pd.read_csv(tmp_path / "summary.csv", dtype=str)
    assert table["peak_memory_bytes"].tolist()[0] == "2000000"
    assert table["time_vs_baseline"].tolist()[0] == "1.0"
    assert table.loc[1, ["peak_memory_bytes", "time_vs_baseline", "side_by_side"]].isna().all()


def test_a_sweep_in_which_nothing_finished_still_has_a_table(tmp_path):
    write_run(tmp_path / "0", "mine", status="failed", losses=())
    assert not report([tmp_path], tmp_path / "report", "amp")
    assert len(pd.read_csv(tmp_path / "report" / "summary.csv")) == 1
    assert not list((tmp_path / "report").glob("*.png"))


@pytest.mark.slow
def test_every_column_of_the_file_has_a_unit_and_a_meaning(tmp_path):
    write_run(tmp_path / "0", "amp")
    write_run(tmp_path / "1", "graph", **WHOLE)
    write_run(tmp_path / "2", "gone", status="failed", losses=())
    report([tmp_path], tmp_path / "report", "amp", formats=[])
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    rows = comparison.rows
    known = {column.name: column for row in rows for column in summary.columns_of(row) if column.in_files}
    written = list(pd.read_csv(tmp_path / "report" / "summary.csv"))
    assert sorted(written) == sorted(known)
    assert {"phase_forward_ms", "phase_whole_step_ms"} <= set(written)
    assert all(known[name].unit and known[name].meaning for name in written)
