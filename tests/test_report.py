import math

import pandas as pd
import pytest

from mpcompare.records import Recorder, find_runs
from mpcompare.report import report
from mpcompare.report.comparison import compare


def write_run(folder, backend, precision="bf16", losses=(2.0, 1.5, 1.0), step_ms=10.0, status="ok", **more):
    folder.mkdir(parents=True)
    identity = {
        "backend": backend, "precision": precision, "task": "t", "batch_size": 8, "seed": 0,
        "config": {"task": {"lr": 0.1, "batch_size": more.get("batch_size", 8)}},
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
            dataset_fingerprint=more.get("dataset_fingerprint", "d"), initial_weights="w",
            device_name=more.get("device_name", "cpu"),
            step_ms_p20=step_ms - 1, step_ms_p50=step_ms, step_ms_p80=step_ms + 1, peak_memory_bytes=2_000_000,
            peak_memory_bytes_analytic=1_900_000, final_loss=losses[-1], test_accuracy=0.5, skipped_steps=1,
        )  # fmt: skip
        recorder.add(status="ok")
    elif status == "failed":
        recorder.add(status=status, error="precision=fp16: no")


def test_summary_compares_with_the_baseline_step_by_step(tmp_path, capsys):
    write_run(tmp_path / "0", "mine", losses=(2.0, 1.5, 0.75), step_ms=5.0)
    write_run(tmp_path / "1", "amp", step_ms=10.0)
    assert report([tmp_path], tmp_path / "report", "amp")
    table = pd.read_csv(tmp_path / "report" / "summary.csv")
    required = ["backend", "engine", "precision", "dataset", "step_ms_p20", "step_ms_p50", "step_ms_p80",
                "speedup_vs_baseline", "peak_memory_bytes", "final_loss", "max_abs_loss_diff_vs_baseline",
                "test_accuracy"]  # fmt: skip
    assert list(table)[: len(required)] == required
    assert table["backend"].tolist() == ["mine", "amp"]
    assert table["speedup_vs_baseline"].tolist() == [2.0, 1.0]
    assert table["max_abs_loss_diff_vs_baseline"].tolist() == [0.25, 0.0]
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
    "difference", [{"batch_size": 16}, {"dataset_fingerprint": "other"}, {"device_name": "gpu"}, {"seed": 1}]
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
    table = pd.read_csv(tmp_path / "report" / "summary.csv")
    assert table["status"].tolist() == ["ok", "failed", "running"]
    assert table["error"].tolist()[1:] == ["precision=fp16: no", "ended without a word: killed, or still running"]
    assert math.isnan(table["speedup_vs_baseline"][1])
    out = capsys.readouterr().out
    assert "mine bf16: failed: precision=fp16: no" in out
    assert "gone bf16: running: ended without a word" in out


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
