import math
import re
import subprocess
import sys

import matplotlib.image
import pandas as pd
import pytest
from rich.console import Console
from support.command import SMALL
from support.records import write_run

from mpcompare.cost import memory
from mpcompare.errors import InputError
from mpcompare.report import remarks
from mpcompare.report.__main__ import main as report_main
from mpcompare.report.columns import percent
from mpcompare.report.comparable import short_names
from mpcompare.report.comparison import compare
from mpcompare.report.contents import Report
from mpcompare.report.figures import loss as loss_figure
from mpcompare.report.figures import memory as memory_figure
from mpcompare.report.figures.phases import phases
from mpcompare.report.outputs import console, summary_csv
from mpcompare.report.report import report
from mpcompare.report.runs import find_runs
from mpcompare.verdict.judge.verdict import Verdict


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
    for name in ("loss", "step_time", "phases", "memory"):
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


def labels(comparisons):
    return [[entry.label for entry in c.entries] for c in comparisons]


def titles(comparisons):
    return [c.title for c in comparisons]


DIFFERENCES = {  # what differs, and the line that says so
    "task.optimizer.lr": ({"lr": 0.2}, "task.optimizer.lr=0.1 in 0, task.optimizer.lr=0.2 in 1"),
    "task.model.hidden": ({"hidden": [8, 4]}, "task.model.hidden=[32] in 0, task.model.hidden=[8, 4] in 1"),
    "task.batch_size": ({"batch_size": 16}, "task.batch_size=8 in 0, task.batch_size=16 in 1"),
    "seed": ({"seed": 1}, "seed=0 in 0, seed=1 in 1"),
    "dataset_fingerprint": ({"dataset_fingerprint": "e"}, "dataset_fingerprint=d in 0, dataset_fingerprint=e in 1"),
    "initial_weights": ({"initial_weights": "v"}, "initial_weights=w in 0, initial_weights=v in 1"),
}


@pytest.mark.parametrize("field", DIFFERENCES)
def test_runs_that_differ_are_refused_with_the_field_and_allowed_by_its_name(tmp_path, field, capsys):
    difference, line = DIFFERENCES[field]
    write_run(tmp_path / "0", "amp")
    write_run(tmp_path / "1", "mine", step_ms=5.0, **difference)
    with pytest.raises(InputError) as refused:
        report([tmp_path], tmp_path / "report", "amp")
    assert str(refused.value) == (
        f"{line}: these are not one comparison; report.allow=[{field}], or --allow {field} of python -m "
        "mpcompare.report, puts them together"
    )
    assert not (tmp_path / "report").exists()
    assert report([tmp_path], tmp_path / "report", "amp", [field])
    assert f"NOT THE SAME: {field} (report.allow)" in capsys.readouterr().out
    (comparison,) = compare(find_runs([tmp_path]), "amp", [field])
    (value,) = difference.values()
    assert comparison.entries[1].label == f"mine bf16 {field.rpartition('.')[2]}={value}"
    assert comparison.entries[1].speedup.median == 2.0
    summary = pd.read_csv(tmp_path / "report" / "summary.csv")
    assert summary["not_the_same"].tolist() == [f"NOT THE SAME: {field} (report.allow)"] * 2


def test_a_refusal_names_every_field_and_what_is_allowed_already(tmp_path):
    write_run(tmp_path / "0", "amp")
    write_run(tmp_path / "1", "mine", lr=0.2, seed=1, initial_weights="v")
    with pytest.raises(InputError) as refused:
        compare(find_runs([tmp_path]), "amp", ["task.optimizer.lr"])
    assert str(refused.value).startswith("seed=0 in 0, seed=1 in 1; initial_weights=w in 0, initial_weights=v in 1: ")
    assert "--allow task.optimizer.lr seed initial_weights of" in str(refused.value)
    (comparison,) = compare(find_runs([tmp_path]), "amp", ["task", "seed", "initial_weights"])
    assert comparison.not_the_same == "NOT THE SAME: task.optimizer.lr, seed, initial_weights (report.allow)"
    assert comparison.title == "t, batch 8, seed 0/1, cpu"


def test_what_is_allowed_holds_what_is_in_it_and_names_are_short_where_they_tell(tmp_path):
    write_run(tmp_path / "0", "amp")
    write_run(tmp_path / "1", "mine", hidden=[8])
    config = tmp_path / "1" / "result.json"
    config.write_text(config.read_text().replace('"Net"', '"Other"'))
    with pytest.raises(InputError, match="task.model._target_=Net in 0, task.model._target_=Other in 1"):
        compare(find_runs([tmp_path]), "amp", ["task.model.hidden"])
    (comparison,) = compare(find_runs([tmp_path]), "amp", ["task.model"])
    assert comparison.not_the_same == "NOT THE SAME: task.model._target_, task.model.hidden (report.allow)"
    assert comparison.entries[1].label == "mine bf16 model._target_=Other"  # from which hidden=[8] need not be told
    assert short_names(["task.model.lr", "task.optimizer.lr", "task.loss", "seed"]) == {
        "task.model.lr": "model.lr", "task.optimizer.lr": "optimizer.lr", "task.loss": "loss", "seed": "seed",
    }  # fmt: skip


def test_labels_leave_out_what_follows_from_the_rest(tmp_path):
    write_run(tmp_path / "0", "amp")
    write_run(tmp_path / "1", "amp", seed=1, initial_weights="v", dataset_fingerprint="e")
    allow = ["seed", "initial_weights", "dataset_fingerprint"]
    assert labels(compare(find_runs([tmp_path]), "amp", allow)) == [["amp bf16 seed=0", "amp bf16 seed=1"]]


def test_what_is_allowed_and_not_different_is_not_mentioned(tmp_path):
    for i, backend in enumerate(("amp", "mine")):
        write_run(tmp_path / str(i), backend)
    (comparison,) = compare(find_runs([tmp_path]), "amp", ["seed", "task"])
    assert comparison.not_the_same == ""
    assert labels([comparison]) == [["amp bf16", "mine bf16"]]


@pytest.mark.parametrize(
    ("allow", "message"),
    [
        (
            ["lr"],
            "report.allow=lr: expected one of task, task._target_, task.model, task.model._target_, task.model.hidden, "
            "task.optimizer, task.optimizer._target_, task.optimizer.lr, task.batch_size, seed, dataset_fingerprint",
        ),
        (["task.nope"], "report.allow=task.nope: expected one of task, "),
        (["device_name"], "report.allow=device_name: expected one of task, "),
        ("seed", "report.allow=seed: expected a list of names, such as [seed,task.optimizer.lr], or []"),
    ],
)
def test_what_cannot_be_allowed_is_named(tmp_path, allow, message):
    write_run(tmp_path / "0", "amp")
    with pytest.raises(InputError) as refused:
        report([tmp_path], tmp_path / "report", "amp", allow)
    assert str(refused.value).startswith(message)


def test_a_sweep_over_the_task_or_the_seed_is_a_comparison_each(tmp_path):
    for i, more in enumerate([{}, {"batch_size": 16}, {"lr": 0.2}, {"seed": 1, "initial_weights": "v"}]):
        write_run(tmp_path / f"{i}-amp", "amp", sweep="s", **more)
        write_run(tmp_path / f"{i}-mine", "mine", sweep="s", **more)
    comparisons = compare(find_runs([tmp_path]), "amp")
    assert labels(comparisons) == [["amp bf16", "mine bf16"]] * 4
    assert [[e.baseline.folder.name for e in c.entries] for c in comparisons] == [[f"{i}-amp"] * 2 for i in range(4)]
    assert titles(comparisons) == [
        "t, batch 8, seed 0, cpu, lr 0.1", "t, batch 16, seed 0, cpu", "t, batch 8, seed 0, cpu, lr 0.2",
        "t, batch 8, seed 1, cpu",
    ]  # fmt: skip
    assert report([tmp_path], tmp_path / "report", "amp")  # two rows of panels


@pytest.mark.parametrize("field", ["dataset_fingerprint", "initial_weights"])
@pytest.mark.parametrize("device_name", ["cpu", "gpu"])
def test_what_was_asked_for_alike_and_came_out_different_is_refused_in_one_sweep_too(tmp_path, field, device_name):
    write_run(tmp_path / "0", "amp", sweep="s")
    write_run(tmp_path / "1", "mine", sweep="s", device_name=device_name, **{field: "other"})
    with pytest.raises(InputError, match=f"{field}=. in 0, {field}=other in 1: these are not one comparison"):
        compare(find_runs([tmp_path]), "amp")


def test_data_that_a_sweep_varied_on_purpose_is_a_comparison_each(tmp_path):
    write_run(tmp_path / "0", "amp", sweep="s")
    write_run(tmp_path / "1", "amp", sweep="s", data="digits", dataset_fingerprint="e")
    assert len(compare(find_runs([tmp_path]), "amp")) == 2
    for folder, more in (("2", {}), ("3", {"data": "digits", "dataset_fingerprint": "e"})):
        write_run(tmp_path / "single" / folder, "amp", **more)
    with pytest.raises(InputError, match="dataset_fingerprint=d in 2, dataset_fingerprint=e in 3"):
        compare(find_runs([tmp_path / "single"]), "amp")


def two_sweeps(folder, here, there):
    for sweep, more, scale in (("A", here, 1.0), ("B", there, 10.0)):
        for i, size in enumerate((8, 16)):
            write_run(folder / sweep / f"{i}-amp", "amp", sweep=sweep, batch_size=size, step_ms=10 * scale, **more)
            write_run(folder / sweep / f"{i}-mine", "mine", sweep=sweep, batch_size=size, step_ms=5 * scale, **more)


@pytest.mark.parametrize(
    ("here", "there", "told_apart"),
    [
        ({"device_name": "cpu"}, {"device_name": "gpu"}, ("cpu", "gpu")),
        ({"threads": 2}, {"threads": 8}, ("cpu, 2 threads", "cpu, 8 threads")),
        ({"host": "0123456789"}, {"host": "abcdefghij"}, ("cpu, host 01234567", "cpu, host abcdefgh")),
        ({}, {"host": "abcdefghij"}, ("cpu", "cpu, host abcdefgh")),
    ],
)
def test_merged_sweeps_of_two_machines_are_facets_and_never_one_ratio(tmp_path, here, there, told_apart):
    two_sweeps(tmp_path, here, there)
    comparisons = compare(find_runs([tmp_path / "A", tmp_path / "B"]), "amp")
    assert [{e.run.result["sweep"] for e in c.entries} for c in comparisons] == [{"A"}, {"A"}, {"B"}, {"B"}]
    for comparison in comparisons:
        assert [e.speedup.median for e in comparison.entries] == [1.0, 2.0]
        assert len({e.run.result["batch_size"] for e in comparison.entries}) == 1
        assert not comparison.not_the_same
    assert titles(comparisons) == [f"t, batch {size}, seed 0, {name}" for name in told_apart for size in (8, 16)]


def test_sweeps_of_one_machine_are_merged_into_one_comparison(tmp_path):
    write_run(tmp_path / "A", "amp", sweep="A")
    write_run(tmp_path / "B", "mine", sweep="B", step_ms=5.0)
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    assert [e.speedup.median for e in comparison.entries] == [1.0, 2.0]


def test_sweeps_are_merged_where_each_shares_a_task_with_another(tmp_path):
    for sweep, seeds in (("A", (0, 1)), ("C", (2, 3)), ("B", (1, 2))):
        for seed in seeds:
            write_run(tmp_path / sweep / str(seed), "amp", sweep=sweep, seed=seed, initial_weights=f"w{seed}")
    assert len(compare(find_runs([tmp_path]), "amp")) == 4  # A and C through B
    with pytest.raises(InputError, match="seed=0 in A/0, seed=2 in C/2; initial_weights=w0 in A/0, "):
        compare(find_runs([tmp_path / "A", tmp_path / "C"]), "amp")


def test_failed_runs_join_what_they_know_of_and_their_own_sweep_first(tmp_path):
    for sweep, device in (("A", "cpu"), ("B", "gpu")):
        write_run(tmp_path / sweep / "0", "mine", sweep=sweep, status="failed", losses=())
        write_run(tmp_path / sweep / "1", "amp", sweep=sweep, device_name=device)
        write_run(tmp_path / sweep / "2", "mine", sweep=sweep, seed=7, status="failed", losses=())
    comparisons = compare(find_runs([tmp_path]), "amp")
    assert [[e.run.name for e in c.entries] for c in comparisons] == [["A/0", "A/1"], ["A/2", "B/2"], ["B/0", "B/1"]]
    assert titles(comparisons)[1] == "t, batch 8, seed 7, no device"
    write_run(tmp_path / "C", "mine", seed=8, status="failed", losses=())
    with pytest.raises(InputError, match="seed=0 in A/0, seed=8 in C: these are not one comparison"):
        compare(find_runs([tmp_path]), "amp")


def test_versions_of_torch_are_told_apart(tmp_path):
    write_run(tmp_path / "0", "amp", torch="2.11.0")
    write_run(tmp_path / "1", "amp")
    write_run(tmp_path / "2", "mine", status="failed", losses=())
    assert labels(compare(find_runs([tmp_path]), "amp")) == [
        ["amp bf16 torch 2.11.0", "amp bf16 torch 2.15.0", "mine bf16"]
    ]


def scratch(master_params=True, accumulate="fp32"):
    return {"_target_": "mpcompare.backends.scratch.Scratch", "master_params": master_params, "accumulate": accumulate}


def test_runs_of_one_backend_are_told_apart_by_the_options_that_are_not_those_of_most(tmp_path):
    write_run(tmp_path / "0", "amp", options={"_target_": "Amp"}, loss_scale="dynamic")
    write_run(tmp_path / "1", "scratch", options=scratch(), loss_scale="dynamic")
    write_run(tmp_path / "2", "scratch", options=scratch(master_params=False), loss_scale="dynamic")
    write_run(tmp_path / "3", "scratch", options=scratch(), loss_scale="none")
    write_run(tmp_path / "4", "scratch", options=scratch(accumulate="fp16"), status="failed", losses=())
    write_run(tmp_path / "5", "scratch", "fp32", options=scratch(), loss_scale="none")
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    assert [entry.label for entry in comparison.entries] == [
        "amp bf16", "scratch bf16", "scratch bf16 master_params=False", "scratch bf16 loss_scale=none",
        "scratch bf16 accumulate=fp16", "scratch fp32",
    ]  # fmt: skip
    rows = summary_csv.rows(Report([comparison], {}, "amp"))
    variants = [row["variant"] or "" for row in rows]
    assert variants == [
        "",
        "",
        "master_params=False",
        "loss_scale=none",
        "accumulate=fp16",
        "",
    ]


def test_of_two_that_differ_both_say_in_what(tmp_path):
    write_run(tmp_path / "0", "scratch", options=scratch())
    write_run(tmp_path / "1", "scratch", options=scratch(accumulate="bf16"))
    write_run(tmp_path / "2", "scratch", options=scratch(accumulate="${scratch.accumulate}"), status="running")
    assert labels(compare(find_runs([tmp_path]), "scratch")) == [
        ["scratch bf16 accumulate=fp32", "scratch bf16 accumulate=bf16", "scratch bf16"]
    ]


def test_options_do_not_choose_the_baseline(tmp_path):
    write_run(tmp_path / "0", "scratch", options=scratch())
    write_run(tmp_path / "1", "scratch", options=scratch(accumulate="bf16"))
    (comparison,) = compare(find_runs([tmp_path]), "scratch")
    assert [entry.baseline.name for entry in comparison.entries] == ["0", "0"]


def test_the_variant_stands_in_the_table(tmp_path, capsys):
    write_run(tmp_path / "0", "amp")
    write_run(tmp_path / "1", "mine", lr=0.25)
    write_run(tmp_path / "2", "mine", lr=0.5, status="failed", losses=())
    assert not report([tmp_path], tmp_path / "report", "amp", ["task"])
    out = capsys.readouterr().out
    assert re.search(r"mine +bf16 +lr=0.25 +torch", out)
    assert re.search(r"mine +bf16 +lr=0.5 +failed", out)


def test_the_command_line_of_the_report_allows_and_refuses(cli, tmp_path):
    write_run(tmp_path / "A", "amp", allow=["seed"])
    write_run(tmp_path / "B", "mine", seed=1)
    folders, out = (str(tmp_path / "A"), str(tmp_path / "B")), ("--out", str(tmp_path / "out"))
    ended = cli(*folders, *out, main=report_main)
    assert ended.code == 0, ended.err  # as the first run was configured
    assert "NOT THE SAME: seed (report.allow)" in ended.out
    ended = cli(*folders, *out, "--allow", main=report_main)
    assert ended.code == 2
    assert ended.err.startswith("mpcompare: error: seed=0 in A, seed=1 in B: these are not one comparison; ")
    assert cli(*folders, *out, "--allow", "task.optimizer", "seed", main=report_main).code == 0
    ended = cli(*folders, *out, "--allow", "sed", main=report_main)
    assert ended.code == 2
    assert ended.err.startswith("mpcompare: error: report.allow=sed: expected one of task, task._target_, ")


@pytest.mark.slow
def test_a_sweep_over_seeds_and_two_runs_of_different_seeds(cli, tmp_path):
    ended = cli("-m", "backend=amp,fp32", "seed=0,1", *SMALL, "hydra/launcher=basic", "hydra.sweep.dir=sweep")
    assert ended.code == 0, ended.err
    summary = pd.read_csv(tmp_path / "sweep" / "report" / "summary.csv").set_index("run")
    assert (summary["seed"] == summary.loc[summary["baseline"], "seed"].to_numpy()).all()
    assert summary["not_the_same"].isna().all()
    for seed in (0, 1):
        assert cli("backend=amp", f"seed={seed}", *SMALL, "hydra/launcher=basic", f"hydra.run.dir=run{seed}").code == 0
    ended = cli("run0", "run1", "--out", "out", main=report_main)
    assert ended.code == 2
    line = ended.err.splitlines()[-1]
    assert line.startswith("mpcompare: error: seed=0 in run0, seed=1 in run1; ")
    assert "; initial_weights=" in line
    allow = re.search(r"--allow (.*) of python", line).group(1).split()
    ended = cli("run0", "run1", "--out", "out", "--allow", *allow, main=report_main)
    assert ended.code == 0, ended.err
    assert "NOT THE SAME: seed, " in ended.out
    assert cli("sweep", "run0", "run1", "--out", "out", main=report_main).code == 0  # the sweep has both seeds


def test_a_report_that_is_refused_after_a_sweep_loses_nothing(cli, tmp_path):
    ended = cli(
        "-m", "backend=amp", "seed=0,1", *SMALL, "hydra/launcher=basic", "report.allow=[seed]", "hydra.sweep.dir=sweep"
    )
    assert ended.code == 2
    line = ended.err.splitlines()[-1]
    assert line.startswith("mpcompare: error: the report cannot be drawn: ")
    assert re.search(r"report.allow=\[seed,(dataset_fingerprint,)?initial_weights\]", line)
    assert len(list((tmp_path / "sweep").glob("*/result.json"))) == 2
    ended = cli("-m", "backend=amp", *SMALL, "hydra/launcher=basic", "report.allow=[sed]", "hydra.sweep.dir=other")
    assert ended.code == 2
    assert "report.allow=sed: expected one of task, " in ended.err
    assert not list((tmp_path / "other").rglob("result.json"))  # said before the first job


@pytest.mark.parametrize(("n", "shape"), [(1, (1, 1)), (3, (1, 3)), (4, (2, 2)), (7, (3, 3))])
def test_figures_are_at_most_three_comparisons_wide(tmp_path, n, shape):
    for i in range(n):
        write_run(tmp_path / f"{i}-amp", "amp", sweep="s", batch_size=8 * (i + 1))
    assert report([tmp_path], tmp_path / "report", "amp")
    for name in ("loss", "step_time", "phases", "memory"):
        height, width = matplotlib.image.imread(tmp_path / "report" / f"{name}.png").shape[:2]
        assert round(width / (6.4 * 150)) == shape[1]
    assert height / shape[0] < 600


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
    monkeypatch.setattr(console, "Console", lambda **_: Console(width=80, force_terminal=True, color_system=None))
    report([tmp_path], tmp_path / "report", "amp")
    out = capsys.readouterr().out
    assert "…" not in out
    for cell in ("scratch", "bf16", "1234", "12.35", "0.01", "not examined"):
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


MEASURED = {
    "device": "cpu", "memory_model": {"inputs": {"x": 200_000}, "activations": {"z0": 900_000, "z1": 800_000}},
    "workspace_bytes": 14_000_000, "batch_bytes": 200_000, "rss_before_bytes": 9_000_000, "peak_rss_bytes": 25_000_000,
    "memory_by_op": {"aten::mm": 1_200_000, "aten::add": 300_000},
}  # fmt: skip


def test_memory_that_is_not_what_the_model_says_is_named(tmp_path, capsys):
    write_run(tmp_path / "0", "above", peak_memory_bytes_analytic=1_900_000, **MEASURED)
    write_run(tmp_path / "1", "close", peak_memory_bytes_analytic=1_910_000, **MEASURED)
    write_run(tmp_path / "2", "below", peak_memory_bytes_analytic=4_000_000)
    write_run(tmp_path / "3", "unknown", peak_memory_bytes_analytic=None, memory_model={})
    assert report([tmp_path], tmp_path / "report", "above")
    out = capsys.readouterr().out
    for cell in ("vs model", " +5.3 % ", " +4.7 % ", " -50.0 % ", " - "):
        assert cell in out
    assert (
        "above bf16: measured 0.1 MB (5.3 %) above the model; most of the peak: aten::mm 1.2 MB, aten::add 0.3" in out
    )
    assert "below bf16: measured 2.0 MB (50.0 %) below the model\n" in out
    assert "close bf16: measured" not in out
    assert "unknown bf16: measured" not in out
    summary = pd.read_csv(tmp_path / "report" / "summary.csv")
    assert summary["workspace_bytes"].tolist()[:2] == [14e6, 14e6]
    assert summary["peak_rss_bytes"].isna().tolist() == [False, False, True, True]


WHOLE = {"phase_ms": {"whole step": 7.5}, "phase_overhead": 0.0}


def test_phases_are_those_of_all_runs_and_a_whole_step_is_one_of_its_own(tmp_path, capsys):
    write_run(tmp_path / "0", "graph", **WHOLE)
    write_run(tmp_path / "1", "amp")
    write_run(tmp_path / "2", "other", phase_ms={"forward": 4.0, "backward": 3.0, "unscale": None, "step": None})
    assert report([tmp_path], tmp_path / "report", "amp")
    out = capsys.readouterr().out
    assert re.search(r"ms in phase +forward +backward +step +update +whole step +clock's cost", out)  # nobody unscales
    assert re.search(r"graph bf16 +- +- +- +- +7\.5 +- +50 ", out)
    assert re.search(r"amp bf16 +4 +5 +1 +0 +- +\+1\.0% +50 ", out)
    assert re.search(r"other bf16 +4 +3 +- +- +- +\+1\.0%", out)
    summary = pd.read_csv(tmp_path / "report" / "summary.csv")
    assert summary["whole_step_ms"].tolist()[0] == 7.5
    assert summary["backward_ms"].tolist()[1:] == [5, 3]
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    figure = phases(Report([comparison], {}, "amp"))
    (axes,) = figure.axes
    ends = [text.get_text() for text in axes.texts if "ms" in text.get_text()]
    assert ends == ["7.5 ms", "10 ms (clock +1.0%)", "7 ms (clock +1.0%)"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["forward", "backward", "step", "update", "whole step"]


def test_where_there_are_whole_steps_only_there_are_no_phases(tmp_path, capsys):
    write_run(tmp_path / "0", "amp", **WHOLE)
    assert report([tmp_path], tmp_path / "report", "amp")
    assert re.search(r"ms in phase +whole step +clock's cost", capsys.readouterr().out)


def test_what_could_not_be_checked_is_said_once_for_those_that_are_the_same(tmp_path):
    for i, backend in enumerate(("amp", "scratch", "fused", "wrong")):
        write_run(tmp_path / str(i), backend)
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    unchecked = ["ReLU (examined as GELU)", "training (no noise was measured)"]
    verdicts = {
        "0": Verdict("reference"), "1": Verdict("same", unchecked=unchecked), "2": Verdict("same", unchecked=unchecked),
        "3": Verdict("differs", unchecked=unchecked),
    }  # fmt: skip
    assert remarks.unchecked(comparison, verdicts) == [
        "scratch bf16, fused bf16: not checked: ReLU (examined as GELU), training (no noise was measured)"
    ]


def test_percent_has_no_negative_zero():
    assert [percent(x) for x in (-1e-9, 0.0051, -0.5, math.nan)] == ["+0.0 %", "+0.5 %", "-50.0 %", "-"]


def test_the_memory_figure_stacks_the_model_and_what_was_measured_and_nothing_overlaps(tmp_path):
    write_run(tmp_path / "0", "mine", **MEASURED)
    write_run(tmp_path / "1", "amp", **{**MEASURED, "workspace_bytes": 0})
    write_run(tmp_path / "2", "old", peak_memory_bytes=20_000_000, peak_memory_bytes_analytic=None)  # no model
    write_run(tmp_path / "3", "gpu", **{**MEASURED, "device": "cuda"})
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    figure = memory_figure.memory(Report([comparison], {}, "amp"))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    widths = {container.get_label(): [bar.get_width() for bar in container] for container in axes.containers}
    assert widths["inputs"] == [0.2]
    assert widths["activations"] == [1.7]
    assert [line.get_xdata()[0] for line in axes.lines] == pytest.approx([16.2, 16.2])  # 25 - 9 + 0.2, not on the GPU
    texts = [text.get_text() for text in axes.texts]
    assert texts[:3] == ["1.9 MB model", "2 MB (+5.3 %) + 14 MB", "16.2 MB resident"]
    assert len(texts) == 3 + 3 + 1 + 2
    assert texts[-1] == "2 MB (+5.3 %)"  # on a GPU the allocator's peak holds the workspace
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "inputs", "activations", memory_figure.ALLOCATED, memory_figure.OUTSIDE, memory_figure.RESIDENT,
    ]  # fmt: skip
    boxes = [text.get_window_extent() for text in axes.texts]
    bars = [bar.get_window_extent() for container in axes.containers for bar in container]
    for place, box in enumerate(boxes):
        assert axes.bbox.x0 < box.x0
        assert box.x1 < axes.bbox.x1
        assert not any(box.overlaps(other) for other in [*boxes[:place], *bars])
    box = legend.get_window_extent()
    assert (box.x0 > 0, box.x1 < figure.bbox.x1, box.y0 > 0, box.y1 < axes.get_tightbbox().y0) == (True,) * 4


def test_without_a_model_the_peak_is_stacked_by_operator(tmp_path):
    by_op = {f"aten::op{n}": 700_000 - 100_000 * n for n in range(7)}
    measured = {**MEASURED, "memory_model": {}, "peak_memory_bytes_analytic": None, "memory_by_op": by_op}
    write_run(tmp_path / "0", "amp", **{**measured, "peak_memory_bytes": 3_000_000})
    write_run(tmp_path / "1", "mine", **MEASURED)
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    figure = memory_figure.memory(Report([comparison], {}, "amp"))
    (axes,) = figure.axes
    widths = {container.get_label(): [bar.get_width() for bar in container] for container in axes.containers}
    assert [widths[f"aten::op{n}"] for n in range(5)] == [pytest.approx([0.7 - 0.1 * n]) for n in range(5)]
    assert widths["other operators"] == pytest.approx([0.2 + 0.1])
    right = max(bar.get_x() + bar.get_width() for c in axes.containers for bar in c if bar.get_y() < -0.1)
    assert right == pytest.approx(3.0)  # all of the peak, the batch included
    assert [text.get_text() for text in axes.texts][:2] == ["by operator", "3 MB + 14 MB"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "inputs", "activations", *(f"aten::op{n}" for n in range(5)), "other operators", memory_figure.ALLOCATED,
        memory_figure.OUTSIDE, memory_figure.RESIDENT,
    ]  # fmt: skip


def test_the_figure_knows_the_kinds_of_the_model():
    assert tuple(memory_figure.KIND_COLOURS) == memory.TENSOR_KINDS
    assert len(set(memory_figure.KIND_COLOURS.values())) == len(memory.TENSOR_KINDS)


def test_who_computes_in_the_turns_of_others_is_named_and_other_programs_are_not_blamed_for_it(tmp_path, capsys):
    write_run(tmp_path / "0", "busy", out_of_turn=1.5, other_cores=0.1)
    write_run(tmp_path / "1", "amp", out_of_turn=0.0015, other_cores=1.6)
    write_run(tmp_path / "2", "later", out_of_turn=1.0, other_cores=1.6, race=None)
    report([tmp_path], tmp_path / "report")
    out = capsys.readouterr().out
    assert "busy bf16: kept 1.5 cores busy in the turns of others" in out
    assert out.count("in the turns of others") == 1
    assert "later bf16: other programs kept 1.6 cores busy while it was timed" in out
    assert out.count("other programs") == 1


def test_a_report_is_drawn_without_torch(tmp_path):
    """torch takes seconds and hundreds of megabytes, and the process that launches a sweep draws its report."""
    write_run(tmp_path / "0", "mine")
    write_run(tmp_path / "1", "amp")
    script = (
        "import sys, mpcompare.__main__, mpcompare.command.callbacks, mpcompare.command.launcher\n"
        "from mpcompare.report.__main__ import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "report" / "summary.csv").exists()


def test_what_was_evaluated_in_between_stands_beside_the_training_loss(tmp_path):
    write_run(tmp_path / "0", "mine", evals=[(1, 2.5, 0.25), (3, 1.5, 0.5)])
    write_run(tmp_path / "1", "amp", evals=[(3, 1.25, 0.75)])  # only after training
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    loss, accuracy, _difference = loss_figure.loss(Report([comparison], {}, "amp")).axes
    (held_out,) = (line for line in loss.lines if line.get_marker() == "s" and len(line.get_xdata()))
    (curve,) = accuracy.lines
    assert (held_out.get_xdata().tolist(), held_out.get_ydata().tolist()) == ([1, 3], [2.5, 1.5])
    assert (curve.get_xdata().tolist(), curve.get_ydata().tolist()) == ([1, 3], [0.25, 0.5])
    assert held_out.get_color() == curve.get_color() == loss.lines[0].get_color()
    assert "held-out loss" in [text.get_text() for text in loss.get_legend().get_texts()]


@pytest.mark.parametrize("evals", [[], [(3, 1.5, 0.5)], [(1, 1.5, None), (3, 1.5, None)]])
def test_without_accuracies_in_between_there_is_no_panel_for_them(tmp_path, evals):
    write_run(tmp_path / "0", "amp", evals=evals)
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    assert [axes.get_ylabel() for axes in loss_figure.loss(Report([comparison], {}, "amp")).axes] == [
        "training and held-out loss" if len(evals) > 1 else "training loss", "|loss - baseline's|",
    ]  # fmt: skip
