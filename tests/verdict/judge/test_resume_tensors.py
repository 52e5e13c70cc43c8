"""Each tensor after a reload, with a limit of its own."""

from dataclasses import replace

import pytest
from support.backends import BACKENDS
from support.judging import dataset_of, examined
from support.tasks import make_task

from mpcompare.report.verdicts import examined_of, judge_run
from mpcompare.tasks.optimizers import AdamW
from mpcompare.verdict.findings import ReloadedTensor
from mpcompare.verdict.judge import resume_tensors
from mpcompare.verdict.judge.resume_tensors import _turned

TASK = make_task(in_features=20, hidden=[64], out_features=5, batch_size=64, samples=64 * 4, momentum=0.9)
DATA = dataset_of(TASK)


def amp(optimizer, precision="bf16"):
    return examined("amp", BACKENDS["amp"], replace(TASK, optimizer=optimizer), DATA, precision, steps=2)


def with_error(run, name, part):
    """Returns the run with a tensor that is so much of its step away after a reload."""
    reload = run.findings.reload
    e = reload.tensors[name]
    tensors = {**reload.tensors, name: ReloadedTensor(part * e.norm, e.norm)}
    return replace(run, findings=replace(run.findings, reload=replace(reload, tensors=tensors)))


@pytest.mark.parametrize(
    ("optimizer", "passes", "fails"),
    [(TASK.optimizer, 0.02, 0.15), (AdamW(1e-3), 0.6, 0.9)],
    ids=["SGD", "AdamW"],
)
def test_a_tensor_may_be_as_far_away_as_gradients_that_are_rounded_otherwise_make_it(optimizer, passes, fails):
    run = amp(optimizer)
    assert set(run.findings.reload.tensors) == set(run.findings.first.finite.gradients)
    assert all(e.error == 0 < e.norm for e in run.findings.reload.tensors.values())
    near, far = with_error(run, "layer1.bias", passes), with_error(run, "layer1.bias", fails)
    assert judge_run(near, near).word == "reference"
    verdict = judge_run(far, far)
    assert (verdict.word, verdict.cause) == ("differs", "resume")
    assert "layer1.bias is" in verdict.because
    (failed,) = [check.name for check in verdict.checks if not check.passed]
    assert failed == "weights after a reload, layer1.bias"


def test_gradients_that_are_rounding_errors_are_left_out():
    run = amp(TASK.optimizer)
    first = run.findings.replays["first"]
    rounding = {**first.rounding}
    rounding["layer1.bias"] = replace(rounding["layer1.bias"], error=run.findings.first.gradients["layer1.bias"].norm)
    vanishing = replace(run, findings=replace(run.findings, replays={"first": replace(first, rounding=rounding)}))
    names = [check.name for check in resume_tensors.checks(examined_of(vanishing))]
    assert names == [f"weights after a reload, {name}" for name in ("layer1.weight", "layer2.weight", "layer2.bias")]


def test_signs_that_turn_are_counted_as_poisson_has_them():
    assert _turned(0.0, 100) == 0
    assert _turned(1.0, 5) == 2
    assert _turned(0.03, 10) == pytest.approx(2 * (3 / 10) ** 0.5)
    assert _turned(0.03, 10**8) == pytest.approx(2 * 0.03**0.5, rel=0.01)
