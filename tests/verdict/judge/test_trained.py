"""Verdicts on the update after training, from records: nothing is trained here."""

from dataclasses import replace

import pytest
from support.backends import BACKENDS
from support.judging import dataset_of, examined
from support.tasks import make_task

from mpcompare.report.runs import Run
from mpcompare.report.verdicts import judge_run
from mpcompare.tasks.optimizers import AdamW
from mpcompare.verdict.findings import from_document, to_document
from mpcompare.verdict.judge.counts import Count
from mpcompare.verdict.judge.drive import KnownMistake
from mpcompare.verdict.judge.trained import TrainedUpdate

NO_DECAY = "without weight decay"
TASK = replace(make_task(samples=32 * 12), optimizer=AdamW(1e-3, weight_decay=0.1), clip_norm=0.1)


@pytest.fixture(scope="module")
def amp() -> Run:
    return examined("amp", BACKENDS["amp"], TASK, dataset_of(TASK), "bf16", steps=4)


def verdict(amp: Run, trained: TrainedUpdate | None):
    other = replace(amp, name="other", findings=replace(amp.findings, trained=trained))
    judged = judge_run(other, amp)
    return judged, {check.name for check in judged.checks if not check.passed}


@pytest.mark.slow
def test_a_right_update_is_within_its_bounds(amp):
    trained = amp.findings.trained
    assert set(trained.moments) == {"exp_avg", "exp_avg_sq"}
    assert {(count.count, count.should_count) for count in trained.counts.values()} == {(5, 5)}
    assert len(trained.drive.clips) == 1
    judged, failed = verdict(amp, trained)
    assert judged.word == "same", judged.because
    assert not failed
    names = [check.name for check in judged.checks if check.kind == "trained"]
    assert "update 1 of pass last, layer1.weight" in names
    assert "exp_avg_sq after training, layer1.bias" in names


def test_an_update_beyond_its_bound_is_named_by_the_mistake_that_makes_it(amp):
    trained = amp.findings.trained
    (update,) = trained.drive.updates
    wrong = {"layer1.weight": replace(update["layer1.weight"], excess=8.0)}
    drive = replace(
        trained.drive, updates=[update | wrong], known_mistakes={NO_DECAY: KnownMistake("weight decay", 0.5)}
    )
    judged, failed = verdict(amp, replace(trained, drive=drive))
    assert (judged.word, judged.cause) == ("differs", "weight decay")
    assert failed == {"update 1 of pass last, layer1.weight"}
    drive = replace(drive, known_mistakes={NO_DECAY: KnownMistake("weight decay", 2.0)}, digits={"exp_avg": 1.0})
    assert verdict(amp, replace(trained, drive=drive))[0].cause == "moments"


def test_moments_that_are_not_what_the_update_makes_are_named(amp):
    trained = amp.findings.trained
    moments = {**trained.moments, "exp_avg": {**trained.moments["exp_avg"], "layer2.bias": 900.0}}
    drive = replace(trained.drive, digits={"exp_avg": 1.0})
    judged, failed = verdict(amp, replace(trained, moments=moments, drive=drive))
    assert (judged.cause, failed) == ("moments", {"exp_avg after training, layer2.bias"})
    assert "16-bit" in judged.because


def test_a_count_that_is_not_that_of_the_updates_is_named(amp):
    trained = amp.findings.trained
    counts = {**trained.counts, "layer1.weight": Count(4.0, 5, "bf16")}
    judged, failed = verdict(amp, replace(trained, counts=counts))
    assert (judged.cause, failed) == ("bias correction", {"count of updates after training, layer1.weight"})


def test_an_update_that_could_not_be_followed_is_said_not_to_be_checked(amp):
    judged, failed = verdict(amp, None)
    assert (judged.word, failed) == ("same", set())
    assert "the update after training" in judged.unchecked


def test_records_without_it_are_read(amp):
    document = to_document(amp.findings)
    del document["trained"]
    assert from_document(document).trained is None
