"""Passes that stop with an error: what other passes found stands."""

import json
from dataclasses import replace

import pytest
from support.backends import BACKENDS
from support.judging import dataset_of, examined
from support.tasks import make_task
from torch import nn

from mpcompare.backends.amp import Amp
from mpcompare.report.verdicts import judge_run
from mpcompare.verdict.examine import examine
from mpcompare.verdict.examine.attempts import Attempts
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.findings import from_document, to_document

TASK = replace(make_task(samples=32 * 12, momentum=0.9), accumulate=2)
DATA = dataset_of(TASK)


class CannotLoad(Amp):
    def load_state_dict(self, state):
        raise NotImplementedError("no state can be\nloaded")


class CannotLoadAndHalves(CannotLoad):
    def step(self, lr):
        super().step(lr / 2)


class DislikesInfinity(Amp):
    def forward(self, x, y):
        if not x.isfinite().all():
            raise ValueError("inf in the batch")
        return super().forward(x, y)


def judged(backend, precision):
    amp = examined("amp", BACKENDS["amp"], TASK, DATA, precision, steps=4, noise=2)
    return judge_run(run := examined("run", backend, TASK, DATA, precision, steps=4), amp), run.findings


@pytest.mark.slow
def test_what_was_found_before_and_after_a_pass_that_stopped_stands(caplog):
    verdict, findings = judged(CannotLoad, "fp16")
    loading = dict.fromkeys(("again", "aged", "resume"), "NotImplementedError: no state can be loaded")
    assert findings.stopped == loading
    assert (findings.aged, findings.resume) == (None, None)
    assert findings.overflow.steps
    assert findings.last.gradients
    assert from_document(json.loads(json.dumps(to_document(findings)))).stopped == loading
    assert str(verdict) == "not examined: again, aged, resume"
    assert verdict.because.startswith("the pass again stopped with NotImplementedError: no state can be loaded; the ")
    assert {"layers", "optimizer", "overflow", "run"} <= {check.kind for check in verdict.checks}
    assert "in load_state_dict" in caplog.text  # the traceback


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "stopped"), [("fp16", "overflow"), ("bf16", "infinite input")])
def test_a_backend_that_dislikes_an_input_is_not_called_the_same(precision, stopped):
    verdict, _ = judged(DislikesInfinity, precision)
    assert str(verdict) == f"not examined: {stopped}"


@pytest.mark.slow
def test_a_mistake_that_another_pass_found_is_named():
    verdict, findings = judged(CannotLoadAndHalves, "bf16")
    assert list(findings.stopped) == ["again", "resume"]
    assert verdict.word == "differs"
    assert verdict.cause == "optimizer"


def normalised():
    return nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 5))


@pytest.mark.slow
def test_a_pass_that_stops_on_what_training_left_accuses_nobody(monkeypatch):
    def stops(*_):
        raise ValueError("not so")

    task = replace(TASK, model=normalised)
    amp = examined("amp", Amp, task, DATA, "bf16", steps=4, noise=2)
    for name in ("masks_of", "buffers_of_backend"):
        monkeypatch.setattr(examine, name, stops)
    monkeypatch.setattr(Subject, "held_out_by", stops)
    run = examined("run", Amp, task, DATA, "bf16", steps=4)
    assert run.findings.stopped == dict.fromkeys(("masks", "buffers", "held_out"), "ValueError: not so")
    verdict = judge_run(run, amp)
    assert [check.name for check in verdict.checks if not check.passed] == []
    assert str(verdict) == "not examined: masks, buffers, held_out"
    assert {"layers", "optimizer", "resume"} <= {check.kind for check in verdict.checks}
    assert not {"run", "held out"} & {check.kind for check in verdict.checks}


def test_an_interrupt_is_no_error_of_a_pass():
    attempts = Attempts()
    with pytest.raises(KeyboardInterrupt), attempts.at("resume"):
        raise KeyboardInterrupt
    assert attempts.stopped == {}
    with attempts.at("resume"):
        raise ValueError("no number")
    assert attempts.stopped == {"resume": "ValueError: no number"}
