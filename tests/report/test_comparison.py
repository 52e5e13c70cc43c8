"""Comparisons: their titles, the labels of their runs, and the baseline of each."""

from dataclasses import replace

import pytest
from support.records import write_run

from mpcompare.errors import InputError
from mpcompare.report import summary
from mpcompare.report.comparison import compare
from mpcompare.report.contents import Report
from mpcompare.report.outputs import data
from mpcompare.report.report import report
from mpcompare.report.runs import find_runs
from mpcompare.report.verdicts import judge_all


def labels(comparisons):
    return [[entry.label for entry in c.entries] for c in comparisons]


def titles(comparisons):
    return [c.title for c in comparisons]


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


@pytest.mark.slow
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


def two_sweeps(folder, here, there):
    for sweep, more, scale in (("A", here, 1.0), ("B", there, 10.0)):
        for i, size in enumerate((8, 16)):
            write_run(folder / sweep / f"{i}-amp", "amp", sweep=sweep, batch_size=size, step_ms=10 * scale, **more)
            write_run(folder / sweep / f"{i}-mine", "mine", sweep=sweep, batch_size=size, step_ms=5 * scale, **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("here", "there", "told_apart"),
    [
        ({"device_name": "cpu"}, {"device_name": "gpu"}, ("cpu", "gpu")),
        ({"threads": 2}, {"threads": 8}, ("cpu, 2 threads", "cpu, 8 threads")),
        ({"host": "0123456789"}, {"host": "abcdefghij"}, ("cpu, host 01234567", "cpu, host abcdefgh")),
    ],
)
def test_merged_sweeps_of_two_machines_are_facets_and_never_one_ratio(tmp_path, here, there, told_apart):
    two_sweeps(tmp_path, here, there)
    comparisons = compare(find_runs([tmp_path / "A", tmp_path / "B"]), "amp")
    assert [{e.run.result.sweep for e in c.entries} for c in comparisons] == [{"A"}, {"A"}, {"B"}, {"B"}]
    for comparison in comparisons:
        assert [e.time_ratio.median for e in comparison.entries] == [1.0, 0.5]
        assert len({e.run.result.batch_size for e in comparison.entries}) == 1
        assert not comparison.not_the_same
    assert titles(comparisons) == [f"t, batch {size}, seed 0, {name}" for name in told_apart for size in (8, 16)]


def test_sweeps_of_one_machine_are_merged_into_one_comparison(tmp_path):
    write_run(tmp_path / "A", "amp", sweep="A")
    write_run(tmp_path / "B", "mine", sweep="B", step_ms=5.0)
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    assert [e.time_ratio.median for e in comparison.entries] == [1.0, 0.5]


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


def test_runs_of_one_backend_are_told_apart_by_the_options_that_most_do_not_have(tmp_path):
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
    rows = data.summary_rows(Report([comparison], "amp"))
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


def test_an_option_that_only_one_run_has_and_values_of_the_loss_scale_tell_runs_apart(tmp_path):
    def scaled(run, **loss_scale):
        config = {**run.result.config, "loss_scale": {"_target_": "DynamicLossScale", **loss_scale}}
        return replace(run, result=replace(run.result, config=config))

    write_run(tmp_path / "0", "scratch", loss_scale="dynamic")
    write_run(tmp_path / "1", "scratch", loss_scale="dynamic", options={"softmax": "fp16"})
    write_run(tmp_path / "2", "scratch", loss_scale="dynamic")
    write_run(tmp_path / "3", "scratch", loss_scale="none")
    runs = find_runs([tmp_path])
    runs[:3] = [scaled(run, init_scale=scale) for run, scale in zip(runs, (1024.0, 1024.0, 2.0), strict=False)]
    assert labels(compare(runs, "scratch")) == [
        ["scratch bf16", "scratch bf16 softmax=fp16", "scratch bf16 init_scale=2.0", "scratch bf16 loss_scale=none"]
    ]  # fmt: skip


def test_options_do_not_choose_the_baseline(tmp_path):
    write_run(tmp_path / "0", "scratch", options=scratch())
    write_run(tmp_path / "1", "scratch", options=scratch(accumulate="bf16"))
    (comparison,) = compare(find_runs([tmp_path]), "scratch")
    assert [entry.baseline.name for entry in comparison.entries] == ["0", "0"]


def test_runs_that_differ_in_nothing_but_the_folder_have_names_of_their_own(tmp_path):
    for i in range(2):
        write_run(tmp_path / str(i), "amp")
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    labels = [entry.label for entry in comparison.entries]
    assert len(set(labels)) == 2
    assert all(label.startswith("amp bf16") for label in labels)


def test_runs_of_two_sweeps_are_told_apart_by_the_folders_of_the_sweeps(tmp_path):
    for sweep in ("monday", "tuesday"):
        for number, backend in enumerate(("mine", "amp")):
            write_run(tmp_path / sweep / str(number), backend, sweep=sweep)
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    names = ["mine bf16 in monday", "amp bf16 in monday", "mine bf16 in tuesday", "amp bf16 in tuesday"]
    assert [entry.label for entry in comparison.entries] == names
    assert [entry.variant for entry in comparison.entries] == ["in monday"] * 2 + ["in tuesday"] * 2


def test_the_plain_backend_of_a_precision_is_its_reference_whoever_ran_first(tmp_path):
    for number, (backend, precision) in enumerate([("mine", "fp32"), ("amp", "bf16"), ("fp32", "fp32")]):
        write_run(tmp_path / str(number), backend, precision)
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    assert {name: verdict.reference for name, verdict in judge_all(comparison).items()} == {
        "0": "2",
        "1": "1",
        "2": "2",
    }


def test_a_run_of_another_variant_start_or_race_has_a_reference_of_its_own(tmp_path):
    for number, (backend, precision, more) in enumerate([
        ("amp", "bf16", {}), ("mine", "fp32", {}), ("fp32", "fp32", {}), ("mine", "fp32", {"seed": 1}),
        ("fp32", "fp32", {"seed": 1}), ("mine", "fp32", {"seed": 2}), ("mine", "fp32", {"race": "other"}),
        ("fp32", "fp32", {"race": "other"}), ("mine", "fp32", {"torch": "2.11.0"}),
    ]):  # fmt: skip
        write_run(tmp_path / str(number), backend, precision, **more)
    (comparison,) = compare(find_runs([tmp_path]), "amp", ["seed"])
    references = {name: verdict.reference for name, verdict in judge_all(comparison).items()}
    assert list(references.values()) == ["0", "2", "2", "4", "4", "5", "7", "7", "8"]


def test_without_the_plain_backend_the_first_run_is_the_reference_of_all_races(tmp_path):
    for number, (backend, precision) in enumerate([("amp", "bf16"), ("scratch", "fp32"), ("mine", "fp32")]):
        write_run(tmp_path / str(number), backend, precision, race=f"race{number}")
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    assert [verdict.reference for verdict in judge_all(comparison).values()] == ["0", "1", "1"]


def test_a_reference_with_which_nobody_is_compared_says_so(tmp_path):
    for number, (backend, precision) in enumerate([("amp", "bf16"), ("fp32", "fp32"), ("mine", "bf16")]):
        write_run(tmp_path / str(number), backend, precision)
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    judged = comparison.judged(judge_all(comparison))
    assert [judged.of_reference(entry) for entry in judged.entries[:2]] == [
        "others are compared with it", "no other run is compared with it",
    ]  # fmt: skip


def test_runs_without_a_step_in_common_have_no_difference_of_losses(tmp_path):
    write_run(tmp_path / "0", "amp")
    write_run(tmp_path / "1", "mine")
    amp, mine = find_runs([tmp_path])
    (comparison,) = compare([amp, replace(mine, steps=mine.steps.assign(step=mine.steps["step"] + 3))], "amp")
    row = comparison.rows[1]
    (column,) = (each for each in summary.COLUMNS if each.name == "max_abs_loss_diff_vs_baseline")
    assert (column.value(row), column.cell(row)) == (None, "-")


def test_a_run_that_was_resumed_is_compared_with_one_from_the_same_checkpoint(tmp_path):
    start = {"resumed_from": {"path": "x", "step": 0, "backend": "amp", "precision": "bf16", "weights": "w"}}
    for number, (backend, more) in enumerate([("amp", {}), ("amp", start), ("mine", start)]):
        write_run(tmp_path / str(number), backend, **more)
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    assert [entry.baseline.name for entry in comparison.entries] == ["0", "1", "1"]
