"""A reference that itself errs is found, and does not widen the limits of the others."""

from dataclasses import replace

import pytest
from support.backends import BACKENDS
from support.judging import dataset_of, examined
from support.tasks import make_task

from mpcompare.report.verdicts import examined_of, judge_run
from mpcompare.verdict.judge.check import Case
from mpcompare.verdict.judge.limits import as_measure, tensor_limit

TASK = make_task(in_features=20, hidden=[64], out_features=5, batch_size=64, samples=64 * 5)
DATA = dataset_of(TASK)


@pytest.fixture(scope="module")
def amp():
    return examined("amp", BACKENDS["amp"], TASK, DATA, "bf16", steps=4, noise=2)


def worse(run, factor):
    """Returns the run with a larger error of one gradient."""
    first = run.findings.first
    e = first.finite.gradients["layer1.weight"]
    gradients = {**first.finite.gradients, "layer1.weight": replace(e, error=factor * e.error)}
    drive = replace(first, finite=replace(first.finite, gradients=gradients))
    return replace(run, findings=replace(run.findings, first=drive))


def test_a_reference_is_held_beside_one_rounding(amp):
    assert judge_run(amp, amp).word == "reference"
    wrong = worse(amp, 20)
    found = judge_run(wrong, wrong)
    assert (found.word, found.cause) == ("differs", "input gradient"), found.because
    (failed,) = [check for check in found.checks if not check.passed]
    assert failed.name == "gradient in the first step, layer1.weight"


def test_a_wrong_reference_hides_none_that_is_as_wrong_and_accuses_none_that_is_right(amp):
    wrong = worse(amp, 20)
    assert judge_run(amp, wrong).word == "same"
    assert judge_run(worse(amp, 15), wrong).word == "differs"
    e, rounding = (wrong.findings.first.finite.gradients["layer1.weight"], wrong.findings.rounding["layer1.weight"])
    case = Case(examined_of(amp), examined_of(wrong))
    measure = as_measure(case, e, rounding)
    assert measure.error == tensor_limit(case.run, replace(e, error=0.0), rounding) < e.error
    assert as_measure(case, e, None) is e


def test_what_an_old_record_does_not_know_is_not_judged(amp):
    old = replace(worse(amp, 20), findings=replace(worse(amp, 20).findings, rounding={}))
    assert judge_run(old, old).word == "reference"
