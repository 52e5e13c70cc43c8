"""Verdicts on held-out loss and accuracy, from records: only the reference is trained here."""

import math
from dataclasses import replace

import pytest
from support.backends import BACKENDS
from support.judging import dataset_of, examined
from support.tasks import make_task

from mpcompare.report.runs import Run
from mpcompare.report.verdicts import judge_run
from mpcompare.verdict.judge.held_out import HeldOut

TASK = make_task(samples=32 * 40)
LOSSES, ACCURACIES = (1.0, 1.001, 0.999), (0.7, 0.7, 0.7)
FACTOR = 31.6 * math.sqrt(2)  # Student's t with two degrees of freedom


@pytest.fixture(scope="module")
def amp() -> Run:
    return examined("amp", BACKENDS["amp"], TASK, dataset_of(TASK), "bf16", steps=40, noise=2)


def with_scores(amp, losses=LOSSES, accuracies=ACCURACIES, targets=1000):
    own, *others = (HeldOut(loss, a, targets) for loss, a in zip(losses, accuracies, strict=True))
    runs = [replace(run, held_out=each) for run, each in zip(amp.findings.noise, others, strict=True)]
    return replace(amp, findings=replace(amp.findings, held_out=own, noise=runs))


def verdict(amp, loss=1.0, accuracy=0.7, **fields):
    own = HeldOut(loss, accuracy, 1000)
    other = replace(amp, name="other", findings=replace(amp.findings, held_out=own), **fields)
    judged = judge_run(other, amp)
    return judged, [check.name for check in judged.checks if not check.passed]


@pytest.mark.slow
def test_the_findings_hold_the_scores_of_a_part_of_the_samples(amp):
    found = [amp.findings.held_out, *(run.held_out for run in amp.findings.noise)]
    in_all = len(dataset_of(TASK).y_test)
    spread = math.ceil(in_all / math.ceil(in_all / (40 * 32 // 16)))
    assert {each.targets for each in found} == {spread - spread % 32}  # whole batches
    assert all(0 < each.loss < 10 and 0 <= each.accuracy <= 1 for each in found)
    assert len({each.loss for each in found}) == 3


def test_a_loss_within_the_noise_is_the_same_and_one_beyond_it_is_not(amp):
    amp = with_scores(amp)
    assert verdict(amp, loss=1.0 + 0.9 * FACTOR * 0.001)[0].word == "same"
    judged, failed = verdict(amp, loss=1.0 - 1.1 * FACTOR * 0.001)
    assert (judged.word, judged.cause, failed) == ("differs", "held-out samples", ["held-out loss"])
    assert "0.95084 after training, and 1 in amp" in judged.because
    assert verdict(amp, loss=math.nan)[1] == ["held-out loss"]


def test_an_accuracy_is_known_to_a_sample_at_most(amp):
    """All three accuracies are 0.7. A count of 1000 is rounded by 0.29 in standard deviation, 12.9 times t."""
    amp = with_scores(amp)
    assert verdict(amp, accuracy=0.7 - 0.012)[0].word == "same"
    judged, failed = verdict(amp, accuracy=0.7 - 0.014)
    assert (judged.cause, failed) == ("held-out samples", ["held-out accuracy"])
    noisy = with_scores(amp, accuracies=(0.7, 0.71, 0.69))
    assert verdict(noisy, accuracy=0.3)[0].word == "same"
    assert verdict(noisy, accuracy=0.2)[1] == ["held-out accuracy"]


def test_runs_that_part_are_compared_by_their_accuracy_if_correct_ones_have_learned(amp):
    amp = with_scores(amp)
    first, *rest = amp.findings.noise
    parted = replace(first, losses=[2 * loss for loss in first.losses])
    amp = replace(amp, findings=replace(amp.findings, noise=[parted, *rest]))
    assert verdict(amp, loss=2.0)[0].word == "same"
    assert verdict(amp, loss=math.inf)[1] == ["held-out loss"]
    assert verdict(amp, accuracy=0.09)[1] == ["held-out accuracy"]
    lost = replace(first, losses=first.losses[::-1])
    assert first.losses[-1] < first.losses[0]
    unstable = replace(amp, findings=replace(amp.findings, noise=[lost, *rest]))
    assert verdict(unstable, accuracy=0.09)[0].word == "same"
    diverged = amp.steps.assign(loss=[*amp.steps["loss"][:-1], math.nan])
    assert not any(name.startswith("held-out") for name in verdict(amp, accuracy=0.09, steps=diverged)[1])


def test_targets_that_are_no_classes_have_no_accuracy(amp):
    amp = with_scores(amp, accuracies=(None, None, None))
    judged, failed = verdict(amp, accuracy=None)
    assert (judged.word, failed) == ("same", [])
    assert [check.name for check in judged.checks if check.kind == "held out"] == ["held-out loss"]
