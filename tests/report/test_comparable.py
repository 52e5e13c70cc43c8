"""Runs that may stand in one report, and runs that are refused."""

import pandas as pd
import pytest
from support.marks import slow_after
from support.records import result_of, write_run

from mpcompare.errors import InputError
from mpcompare.report import comparable
from mpcompare.report.comparable import short_names
from mpcompare.report.comparison import compare
from mpcompare.report.report import report
from mpcompare.report.runs import Run, find_runs

DIFFERENCES = {  # the difference, and the line that names it
    "task.optimizer.lr": ({"lr": 0.2}, "task.optimizer.lr=0.1 in 0, task.optimizer.lr=0.2 in 1"),
    "task.model.hidden": ({"hidden": [8, 4]}, "task.model.hidden=[32] in 0, task.model.hidden=[8, 4] in 1"),
    "task.batch_size": ({"batch_size": 16}, "task.batch_size=8 in 0, task.batch_size=16 in 1"),
    "seed": ({"seed": 1}, "seed=0 in 0, seed=1 in 1"),
    "dataset_fingerprint": ({"dataset_fingerprint": "e"}, "dataset_fingerprint=d in 0, dataset_fingerprint=e in 1"),
    "initial_weights": ({"initial_weights": "v"}, "initial_weights=w in 0, initial_weights=v in 1"),
}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("field", slow_after(1, DIFFERENCES))
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
    assert report([tmp_path], tmp_path / "report", "amp", [field], formats=[])
    assert f"NOT THE SAME: {field} (report.allow)" in capsys.readouterr().out
    (comparison,) = compare(find_runs([tmp_path]), "amp", [field])
    (value,) = difference.values()
    assert comparison.entries[1].label == f"mine bf16 {field.rpartition('.')[2]}={value}"
    assert comparison.entries[1].time_ratio.median == 0.5
    summary = pd.read_csv(tmp_path / "report" / "summary.csv")
    assert summary["not_the_same"].tolist() == [f"NOT THE SAME: {field} (report.allow)"] * 2


def test_runs_of_one_sweep_with_other_numbers_of_steps_are_a_comparison_each(tmp_path):
    for number, losses in enumerate(((2.0, 1.5), (2.0, 1.5, 1.2, 1.0))):
        for backend in ("amp", "mine"):
            write_run(tmp_path / f"{backend}{number}", backend, losses=losses, sweep="s")
    comparisons = compare(find_runs([tmp_path]), "amp")
    titles = {each.title: [entry.baseline.name for entry in each.entries] for each in comparisons}
    of_task = "t, batch 8, seed 0, cpu, steps"
    assert titles == {f"{of_task} 2": ["amp0", "amp0"], f"{of_task} 4": ["amp1", "amp1"]}
    apart = find_runs([tmp_path / "amp0", tmp_path / "mine1"])
    (comparison,) = compare(apart, "amp", ["train.steps"])
    assert [entry.label for entry in comparison.entries] == ["amp bf16 steps=2", "mine bf16 steps=4"]


def test_a_run_is_not_judged_by_a_run_with_another_number_of_steps(tmp_path):
    write_run(tmp_path / "0", "amp")
    write_run(tmp_path / "1", "mine", losses=(2.0, 1.5))
    of = find_runs([tmp_path])
    with pytest.raises(InputError, match="train.steps=3 in 0, train.steps=2 in 1: these are not one comparison"):
        compare(of, "amp")
    assert comparable.differing(of[0], of[1]) == ["train.steps"]


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
    assert comparison.entries[1].label == "mine bf16 model._target_=Other"  # it need not be told from hidden=[8]
    assert short_names(["task.model.lr", "task.optimizer.lr", "task.loss", "seed"]) == {
        "task.model.lr": "model.lr", "task.optimizer.lr": "optimizer.lr", "task.loss": "loss", "seed": "seed",
    }  # fmt: skip


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


def test_sweeps_are_merged_where_each_shares_a_task_with_another(tmp_path):
    for sweep, seeds in (("A", (0, 1)), ("C", (2, 3)), ("B", (1, 2))):
        for seed in seeds:
            write_run(tmp_path / sweep / str(seed), "amp", sweep=sweep, seed=seed, initial_weights=f"w{seed}")
    assert len(compare(find_runs([tmp_path]), "amp")) == 4  # A and C through B
    with pytest.raises(InputError, match="seed=0 in A/0, seed=2 in C/2; initial_weights=w0 in A/0, "):
        compare(find_runs([tmp_path / "A", tmp_path / "C"]), "amp")


@pytest.mark.slow
def test_a_report_of_many_tasks_compares_each_run_with_runs_of_its_task_only(tmp_path, monkeypatch):
    calls, real = [], comparable.differing
    monkeypatch.setattr(comparable, "differing", lambda *runs: calls.append(runs) or real(*runs))
    nothing = pd.DataFrame()

    def run(number):
        config = {"task": {"lr": number % 500, "hidden": [8]}, "data": {}}
        result = result_of(config=config, sweep=str(number // 500), device_name="CPU", host="a")
        return Run(tmp_path / str(number), str(number), result, nothing, nothing)

    runs = [run(number) for number in range(1000)]  # 500 tasks of two runs each
    comparable.check_comparable(runs[:501], [])  # one task that two sweeps share holds them together
    groups = comparable.group(runs, [])
    assert [[each.name for each in group] for group in groups] == [[str(n), str(n + 500)] for n in range(500)]
    assert len(calls) <= 2 * len(runs)
