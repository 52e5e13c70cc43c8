"""The word of a verdict, and its list of parts that could not be checked."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planted.judged import reference
from planted.mlp import MLP
from support.backends import BACKENDS
from support.judging import dataset_of, examined
from support.tasks import make_task
from torch import nn

from mpcompare.backends.scratch import Scratch
from mpcompare.report.verdicts import judge_run
from mpcompare.tasks.optimizers import AdamW, Sgd
from mpcompare.tasks.task import Task
from mpcompare.verdict.judge import kinds


class Opaque(Scratch):
    """``scratch`` that shows no gradients, like a step in one graph."""

    def grads(self):
        return {}


class Beyond(nn.Module):
    """Multiplies with a number that fp16 does not hold."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(20, 5)

    def forward(self, x):
        return self.linear(x) * torch.tensor(1e6).half()


class OpaqueAndWrong(Opaque):
    def backward(self):
        self.dlogits *= 1.01
        super().backward()


def test_every_file_that_has_checks_is_among_the_kinds():
    files = Path(kinds.__file__).parent.glob("*.py")
    found = {file.stem for file in files if re.search(r"^(def checks\(|checks =)", file.read_text(), re.MULTILINE)}
    assert found == set(kinds.ORDER)


def test_without_gradients_the_run_alone_is_judged():
    task, dataset, amp = reference(MLP, "bf16")
    verdict = judge_run(examined("opaque", Opaque, task, dataset, "bf16"), amp)
    assert verdict.word == "within noise"
    assert verdict.unchecked == ["gradients in the first step", "gradients after training"]
    verdict = judge_run(examined("wrong", OpaqueAndWrong, task, dataset, "bf16"), amp)
    assert (verdict.word, verdict.cause) == ("differs", "run")
    silent = replace(amp, findings=replace(amp.findings, noise=[]))
    assert str(judge_run(examined("opaque", Opaque, task, dataset, "bf16"), silent)) == "not comparable: gradients"


@pytest.mark.slow
def test_without_gradients_a_step_that_is_skipped_is_not_called_wrong():
    task = make_task(samples=32 * 12)
    amp = examined("amp", BACKENDS["amp"], task, dataset_of(task), "fp16", steps=4, noise=2)
    verdict = judge_run(examined("opaque", Opaque, task, dataset_of(task), "fp16", steps=4), amp)
    assert verdict.word == "within noise", verdict.because


def test_a_network_whose_gradients_are_never_finite_is_not_called_right():
    task = Task(Beyond, "cross_entropy", Sgd(0.1, 0.0), 32)
    data = dataset_of(make_task(samples=32 * 12))
    amp = examined("amp", BACKENDS["amp"], task, data, "fp16", steps=2, noise=2)
    run = examined("master_weights", BACKENDS["master_weights"], task, data, "fp16", steps=2)
    doubted, verdict = judge_run(amp, amp), judge_run(run, amp)
    assert str(doubted) == "reference in doubt"
    assert doubted.because.startswith("the gradients of the first batch are inf or NaN at loss scales from 65536 to ")
    assert (str(verdict), verdict.because) == ("not comparable: gradients", doubted.because)


def test_what_was_not_examined_or_not_the_same_task_is_not_judged():
    task, dataset, amp = reference(MLP, "bf16")
    run = examined("scratch", Scratch, task, dataset, "bf16", steps=2)
    assert str(judge_run(replace(run, findings=None), amp)) == "not examined"
    one, other = (
        replace(each, result=replace(each.result, config={"task": {"optimizer": {"lr": lr}}}))
        for each, lr in ((amp, 0.2), (run, 0.1))
    )
    assert str(judge_run(other, one)) == "not comparable: task.optimizer.lr"


@pytest.mark.slow
def test_gradients_that_overflow_in_a_new_backend_too_are_not_held_against_the_trained_one():
    """The run diverged and amp did not, so the trained backend and the new one have inf and NaN after training."""
    task = make_task(in_features=30, hidden=[24], batch_size=64, samples=640)
    amp, run = (
        examined(name, BACKENDS[name], task, dataset_of(task), "bf16", steps=4, noise=2 if name == "amp" else 0)
        for name in ("amp", "scratch")
    )
    last = run.findings.last
    gradients = {name: replace(e, norm=math.inf, error=math.nan) for name, e in last.gradients.items()}
    last = replace(last, loss=math.nan, exact_loss=math.nan, gradients=gradients)
    run = replace(run, findings=replace(run.findings, last=last))
    verdict = judge_run(run, amp)
    assert verdict.word == "same", verdict.because
    assert any(what.startswith("gradients after training that overflow") for what in verdict.unchecked)


@pytest.mark.slow
def test_under_adam_everything_is_checked():
    task = replace(make_task(samples=32 * 12), optimizer=AdamW(1e-3))
    amp, scratch = (
        examined(n, BACKENDS[n], task, dataset_of(task), "bf16", steps=4, noise=2) for n in ("amp", "scratch")
    )
    verdict = judge_run(scratch, amp)
    assert verdict.word == "same", verdict.because
    assert verdict.unchecked == []
    without = {name: layers for name, layers in scratch.findings.replays.items() if name != "sharp"}
    verdict = judge_run(replace(scratch, findings=replace(scratch.findings, replays=without)), amp)
    assert (verdict.word, len(verdict.unchecked)) == ("same", 1)
    assert verdict.unchecked[0].startswith("layers at sharp weights")
