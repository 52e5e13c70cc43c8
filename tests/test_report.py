import math

import pandas as pd
import pytest
from rich.console import Console

from mpcompare.records import Recorder, find_runs
from mpcompare.report import report, table
from mpcompare.report.comparison import compare


def write_run(folder, backend, precision="bf16", losses=(2.0, 1.5, 1.0), step_ms=10.0, status="ok", **more):
    folder.mkdir(parents=True)
    identity = {
        "backend": backend, "precision": precision, "task": "t", "batch_size": 8, "seed": 0,
        "config": {
            "task": {"lr": 0.1, "batch_size": more.get("batch_size", 8)},
            "train": {"steps": len(losses), "warmup_steps": 0},
        },
    }  # fmt: skip
    recorder = Recorder(folder, {**identity, **{k: v for k, v in more.items() if k in identity}})
    rows = [
        {"step": i, "warmup": i == 1, "loss": loss, "loss_scale": 1.0, "skipped": i == 2, "step_ms": step_ms}
        for i, loss in enumerate(losses, start=1)
    ]
    if rows:
        recorder.steps(rows)
    if status == "ok":
        recorder.add(
            engine="torch", loss_scale="NoLossScale", dataset="synthetic", dataset_reason="asked for",
            dataset_fingerprint=more.get("dataset_fingerprint", "d"), initial_weights=more.get("initial_weights", "w"),
            device_name=more.get("device_name", "cpu"),
            step_ms_p20=step_ms - 1, step_ms_p50=step_ms, step_ms_p80=step_ms + 1, peak_memory_bytes=2_000_000,
            peak_memory_bytes_analytic=1_900_000, final_loss=losses[-1], test_accuracy=0.5, skipped_steps=1,
        )  # fmt: skip
        recorder.add(status="ok")
    elif status == "failed":
        recorder.add(status=status, error="precision=fp16: no")


def test_summary_compares_with_the_baseline_step_by_step(tmp_path, capsys):
    write_run(tmp_path / "0", "mine", losses=(2.0, 1.25, 1.125), step_ms=5.0)
    write_run(tmp_path / "1", "amp", step_ms=10.0)
    assert report([tmp_path], tmp_path / "report", "amp")
    summary = pd.read_csv(tmp_path / "report" / "summary.csv")
    required = ["backend", "engine", "precision", "dataset", "step_ms_p20", "step_ms_p50", "step_ms_p80",
                "speedup_vs_baseline", "peak_memory_bytes", "final_loss", "max_abs_loss_diff_vs_baseline",
                "test_accuracy"]  # fmt: skip
    assert list(summary)[: len(required)] == required
    assert summary["backend"].tolist() == ["mine", "amp"]
    assert summary["speedup_vs_baseline"].tolist() == [2.0, 1.0]
    assert summary["max_abs_loss_diff_vs_baseline"].tolist() == [0.25, 0.0]
    for name in ("loss", "step_time", "memory"):
        assert (tmp_path / "report" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "x amp" in out
    assert "2.5e-01" in out
    assert f"Report: {tmp_path / 'report'}" in out


def test_the_baseline_is_in_the_same_precision_where_it_can_be(tmp_path):
    for i, (backend, precision) in enumerate([("mine", "fp16"), ("amp", "bf16"), ("amp", "fp16"), ("fp32", "fp32")]):
        write_run(tmp_path / str(i), backend, precision)
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    assert [entry.baseline.folder.name for entry in comparison.entries] == ["2", "1", "2", "1"]
    assert [entry.label for entry in comparison.entries] == ["mine fp16", "amp bf16", "amp fp16", "fp32"]


def test_without_the_baseline_the_first_finished_run_takes_its_place(tmp_path):
    write_run(tmp_path / "0", "broken", status="failed", losses=())
    write_run(tmp_path / "1", "mine")
    write_run(tmp_path / "2", "other")
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    assert [entry.baseline and entry.baseline.folder.name for entry in comparison.entries] == [None, "1", "1"]


@pytest.mark.parametrize(
    "difference",
    [
        {"batch_size": 16},
        {"dataset_fingerprint": "other"},
        {"device_name": "gpu"},
        {"seed": 1},
        {"initial_weights": "v"},
    ],
)
def test_different_tasks_data_seeds_and_devices_are_never_compared(tmp_path, difference):
    write_run(tmp_path / "0", "amp")
    write_run(tmp_path / "1", "mine", **difference)
    comparisons = compare(find_runs([tmp_path]), "amp")
    assert [[e.label for e in c.entries] for c in comparisons] == [["amp bf16"], ["mine bf16"]]
    assert comparisons[1].entries[0].baseline.folder.name == "1"
    assert report([tmp_path], tmp_path / "report", "amp")  # two panels


def test_a_failed_run_is_a_row_that_says_why(tmp_path, capsys):
    write_run(tmp_path / "0", "amp")
    write_run(tmp_path / "1", "mine", status="failed", losses=())
    write_run(tmp_path / "2", "gone", status="running", losses=(2.0,))
    assert not report([tmp_path], tmp_path / "report", "amp")
    summary = pd.read_csv(tmp_path / "report" / "summary.csv")
    assert summary["status"].tolist() == ["ok", "failed", "running"]
    assert summary["error"].tolist()[1:] == ["precision=fp16: no", "ended without a word: killed, or still running"]
    assert math.isnan(summary["speedup_vs_baseline"][1])
    out = capsys.readouterr().out
    assert "mine bf16: failed: precision=fp16: no" in out
    assert "gone bf16: running: ended without a word" in out


def test_a_loss_that_is_nan_is_not_no_difference(tmp_path, capsys):
    write_run(tmp_path / "0", "amp")
    write_run(tmp_path / "1", "mine", losses=(2.0, math.nan, 1.0))
    assert report([tmp_path], tmp_path / "report", "amp")
    assert " nan " in capsys.readouterr().out
    assert (tmp_path / "report" / "summary.csv").read_text().splitlines()[2].split(",")[10] == "nan"


def test_a_narrow_terminal_gets_whole_numbers_in_fewer_columns(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "0", "scratch", step_ms=1234.5)
    write_run(tmp_path / "1", "amp", step_ms=12.345)
    monkeypatch.setattr(table, "Console", lambda **_: Console(width=80, force_terminal=True, color_system=None))
    report([tmp_path], tmp_path / "report", "amp")
    out = capsys.readouterr().out
    assert "…" not in out
    for cell in ("scratch", "bf16", "1234", "12.35", "0.01", "0.0e+00"):
        assert cell in out


def test_a_baseline_that_is_not_there_is_said(tmp_path, capsys):
    write_run(tmp_path / "0", "mine")
    report([tmp_path], tmp_path / "report", "amp")
    assert "report.baseline=amp is not among the runs" in capsys.readouterr().out


def test_a_report_that_cannot_be_written_still_prints_its_table(tmp_path, capsys):
    write_run(tmp_path / "0", "amp")
    (tmp_path / "report").write_text("a file")
    with pytest.raises(OSError, match="exists"):
        report([tmp_path], tmp_path / "report", "amp")
    assert "amp" in capsys.readouterr().out


def test_a_sweep_in_which_nothing_finished_still_has_a_table(tmp_path):
    write_run(tmp_path / "0", "mine", status="failed", losses=())
    assert not report([tmp_path], tmp_path / "report", "amp")
    assert len(pd.read_csv(tmp_path / "report" / "summary.csv")) == 1
    assert not list((tmp_path / "report").glob("*.png"))


def test_runs_that_differ_in_nothing_but_the_folder_have_names_of_their_own(tmp_path):
    for i in range(2):
        write_run(tmp_path / str(i), "amp")
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    labels = [entry.label for entry in comparison.entries]
    assert len(set(labels)) == 2
    assert all(label.startswith("amp bf16") for label in labels)
