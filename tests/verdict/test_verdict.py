"""The verdict's power: planted bugs are found, by their names, and correct runs are not accused."""

import json
from dataclasses import replace
from typing import Any

import pytest
from planted.mlp import MUTANTS
from support.backends import BACKENDS
from support.command import SMALL
from support.correct import random_task
from support.judging import dataset_of, examined
from support.marks import CUDA, slow_after
from support.tasks import make_task, mlp_of

from mpcompare.backends.scratch import Scratch
from mpcompare.records import Run
from mpcompare.report.__main__ import main as report_main
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.data.generated import synthetic
from mpcompare.tasks.task import Task
from mpcompare.verdict.judge.verdict import judge_run

DIGITS = {
    "in_features": 784, "hidden": [256], "out_features": 10, "loss": "cross_entropy", "batch_size": 512,
    "samples": 10240, "lr": 0.05,
}  # fmt: skip
references: dict[str, tuple[Dataset, Run]] = {}


def reference(precision: str, **changes: Any) -> tuple[Task, Dataset, Run]:
    """A task, its data and amp on it."""
    task = make_task(**{**DIGITS, **changes})
    key = repr((precision, sorted(changes.items())))
    if key not in references:
        dataset = dataset_of(task)
        run = examined("amp", BACKENDS["amp"], task, dataset, precision, noise=2)
        references[key] = dataset, run
    return task, *references[key]


PLANTED = [(name, precision) for name, mutant in MUTANTS.items() for precision in mutant.precisions]
# Some of each kind are tried by the plain command.
BUGS = [pytest.param(*bug, marks=[pytest.mark.slow] if n % 8 else []) for n, bug in enumerate(PLANTED)]


@pytest.mark.parametrize(("name", "precision"), BUGS)
def test_a_planted_bug_is_found_and_named(name, precision):
    mutant = MUTANTS[name]
    task, dataset, amp = reference(precision, **(mutant.task or {}))
    verdict = judge_run(examined(name, mutant.backend, task, dataset, precision), amp)
    if mutant.invisible:
        assert verdict.word == "same"  # or it is not invisible any more
    else:
        assert (verdict.word, verdict.cause) == ("differs", mutant.cause), verdict.because
        assert verdict.because


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("seed", slow_after(2, range(25)))
def test_correct_runs_are_the_same_whatever_the_task(seed, precision, device):
    """25 shapes, depths, losses and seeds, in two precisions, with two backends: 100 correct runs."""
    task = random_task(seed)
    mlp = mlp_of(task)
    dataset = synthetic(seed, task.samples, mlp.in_features, mlp.out_features, task.loss)
    amp = examined("amp", BACKENDS["amp"], task, dataset, precision, seed, noise=2, device=device)
    assert judge_run(amp, amp).word == "reference"
    for name in ("scratch", "fused"):
        run = examined(name, BACKENDS[name], task, dataset, precision, seed, device=device)
        verdict = judge_run(run, amp)
        assert verdict.word == "same", (name, task, verdict.cause, verdict.because)
        assert all(what.startswith("training from step") for what in verdict.unchecked)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_scratch_and_fused_are_the_same_on_real_digits(precision):
    task, dataset, amp = reference(precision)
    for name in ("scratch", "fused"):
        verdict = judge_run(examined(name, BACKENDS[name], task, dataset, precision), amp)
        assert verdict.word == "same", verdict.because
        # The gradients' errors are those of amp, not merely below twice as much.
        ratios = [c.value / c.limit for c in verdict.checks if c.kind == "gradients" and c.name.startswith("gradient")]
        assert max(ratios) < 0.55


class Opaque(Scratch):
    """Shows no gradients, as a step that is one graph may not."""

    def grads(self):
        return {}


class OpaqueAndWrong(Opaque):
    def backward(self):
        self.dlogits *= 1.01
        super().backward()


def test_without_gradients_the_run_alone_is_judged():
    task, dataset, amp = reference("bf16")
    verdict = judge_run(examined("opaque", Opaque, task, dataset, "bf16"), amp)
    assert verdict.word == "within noise"
    assert verdict.unchecked == ["gradients in the first step", "gradients after training"]
    verdict = judge_run(examined("wrong", OpaqueAndWrong, task, dataset, "bf16"), amp)
    assert (verdict.word, verdict.cause) == ("differs", "optimizer")
    silent = replace(amp, numerics={**amp.numerics, "noise": []})
    assert str(judge_run(examined("opaque", Opaque, task, dataset, "bf16"), silent)) == "not comparable: gradients"


def test_what_was_not_examined_or_not_the_same_task_is_not_judged():
    task, dataset, amp = reference("bf16")
    run = examined("scratch", Scratch, task, dataset, "bf16", steps=2)
    assert str(judge_run(replace(run, numerics=None), amp)) == "not examined"
    other = replace(run, result={**run.result, "seed": 1, "config": {"task": {"optimizer": {"lr": 0.1}}}})
    assert str(judge_run(other, amp)) == "not comparable: task.optimizer.lr"


@pytest.mark.parametrize("launcher", ["basic", pytest.param("side_by_side", marks=pytest.mark.slow)])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_sweep_ends_with_a_verdict_on_each(cli, tmp_path, device, launcher):
    folder = tmp_path / "sweep"
    (tmp_path / "conf" / "backend").mkdir(parents=True)
    (tmp_path / "conf" / "backend" / "wrong.yaml").write_text("_target_: planted.mlp.MeanTakenTwice\n")
    arguments = (*SMALL, f"device={device}", "precision=bf16", "verdict.noise=1", f"hydra.sweep.dir={folder}",
                 f"hydra/launcher={launcher}")  # fmt: skip
    ended = cli("--config-dir", str(tmp_path / "conf"), "-m", "backend=scratch,amp,wrong", *arguments)
    assert ended.code == 0, ended.err  # report.strict=false
    verdicts = json.loads((folder / "report" / "verdict.json").read_text())
    words = {name: (v["word"], v["cause"]) for name, v in verdicts.items()}
    assert words == {
        "0-scratch-bf16": ("same", ""),
        "1-amp-bf16": ("reference", ""),
        "2-wrong-bf16": ("differs", "gradient scaled"),
    }
    checks = {c["name"]: c for c in verdicts["2-wrong-bf16"]["checks"]}
    assert checks["gradient in the first step, layer1.weight"]["passed"] is False
    assert "differs: gradient scaled: every gradient is 0.0156" in ended.out
    assert "times what it should be: 1 / the batch size" in ended.out
    assert cli(str(folder), "--strict", main=report_main).code == 1


def test_verdicts_can_be_left_out(cli, tmp_path):
    folder = tmp_path / "sweep"
    ended = cli(
        "-m",
        "backend=scratch,amp",
        *SMALL,
        "hydra/launcher=basic",
        "verdict.enabled=false",
        f"hydra.sweep.dir={folder}",
    )
    assert ended.code == 0, ended.err
    verdicts = json.loads((folder / "report" / "verdict.json").read_text())
    assert {v["word"] for v in verdicts.values()} == {"not examined"}
    assert not list(folder.glob("*/numerics.json"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("verdict.noise=-1", "verdict.noise=-1: expected a whole number of at least 0"),
        ("verdict.enabled=maybe", "verdict.enabled=maybe: expected true or false"),
    ],
)
def test_bad_values_are_one_line(cli, override, message):
    ended = cli(*SMALL, override)
    assert ended.code == 2
    assert message in ended.err
    assert len(ended.err.strip().splitlines()) == 1
