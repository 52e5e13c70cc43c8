"""Functions that do nothing at the initial weights."""

from dataclasses import replace

import pytest
from support.backends import BACKENDS
from support.judging import dataset_of, examined
from support.tasks import make_task
from torch import nn

from mpcompare.backends.amp import Amp
from mpcompare.report.verdicts import judge_run

MLP = make_task(in_features=20, hidden=[64], out_features=5, batch_size=64, samples=64 * 4)
TASK = replace(MLP, model=lambda: nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 5)))
DATA = dataset_of(MLP)


class Capped(Amp):
    """Bends the logits to stay within 30."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.model.register_forward_hook(lambda _, __, output: 30 * (output / 30).tanh())


@pytest.fixture(scope="module")
def amp():
    return examined("amp", BACKENDS["amp"], TASK, DATA, "bf16", steps=3, noise=2)


def test_only_sharp_weights_show_a_soft_cap(amp):
    verdict = judge_run(examined("capped", Capped, TASK, DATA, "bf16", steps=3), amp)
    assert (verdict.word, verdict.cause) == ("differs", "forward pass"), verdict.because
    assert "those of the first step are right, and at sharp weights" in verdict.because
    assert {check.kind for check in verdict.checks if not check.passed} == {"sharp"}


def changed(run, **changes):
    findings = run.findings
    return replace(run, findings=replace(findings, sharp=findings.sharp and replace(findings.sharp, **changes)))


def test_gradients_that_lose_half_of_their_digits_are_not_judged(amp):
    rounding = {name: replace(e, error=100 * e.error) for name, e in amp.findings.sharp.rounding.items()}
    one = {**amp.findings.sharp.rounding, "0.weight": rounding["0.weight"]}

    def judged(reference):
        verdict = judge_run(amp, reference)
        return [check.name for check in verdict.checks if check.kind == "sharp"]

    assert "gradient at sharp weights, 0.weight" in judged(changed(amp))
    names = judged(changed(amp, rounding=one))
    assert "gradient at sharp weights, 2.weight" in names
    assert "gradient at sharp weights, 0.weight" not in names
    assert judged(changed(amp, rounding=rounding)) == []


def test_old_records_say_nothing_of_it(amp):
    old = replace(amp, findings=replace(amp.findings, sharp=None))
    assert judge_run(old, amp).word == judge_run(amp, replace(old, name="other")).word == "same"
