"""Verdicts on buffers after training, from records: only the reference is trained here."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.backends import BACKENDS
from support.judging import dataset_of, examined
from support.tasks import make_task
from torch import nn

from mpcompare.report.runs import Run
from mpcompare.report.verdicts import judge_run


def network():
    return nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 5))


MLP = make_task(samples=32 * 12)
DATA, TASK = dataset_of(MLP), replace(MLP, model=network)
BOTH = ("amp", "master_weights")
MEAN, COUNT = "1.running_mean", "1.num_batches_tracked"


@pytest.fixture(scope="module")
def amp() -> Run:
    return examined("amp", BACKENDS["amp"], TASK, DATA, "bf16", steps=4, noise=2)


def verdict(amp, **changed):
    """Returns the verdict on a run with these findings, and the names of the checks that fail."""
    other = replace(amp, name="other", findings=replace(amp.findings, **changed))
    judged = judge_run(other, amp)
    return judged, [check.name for check in judged.checks if not check.passed]


def changed(amp, name, **fields):
    """Returns the findings' buffers with other fields in one buffer."""
    return {**amp.findings.buffers, name: replace(amp.findings.buffers[name], **fields)}


def test_the_findings_hold_what_training_moved(amp):
    buffers = amp.findings.buffers
    assert set(buffers) == {MEAN, "1.running_var", COUNT}
    assert (buffers[COUNT].whole, buffers[COUNT].dtype) == ("4", "int64")
    assert (buffers[MEAN].elements, buffers[MEAN].dtype, buffers[MEAN].short) == (32, "fp32", 0.0)
    assert all(set(run.buffers) == set(buffers) for run in amp.findings.noise)
    assert set(amp.findings.last_buffers) == set(buffers)
    judged, failed = verdict(amp)
    assert (judged.word, failed) == ("same", []), judged.because
    names = {check.name for check in judged.checks if check.kind == "trained buffers"}
    assert {"buffers after the run", f"whole number, {COUNT}", f"buffer after training, {MEAN}"} <= names


def test_buffers_that_could_not_be_read_are_not_compared(amp):
    judged, failed = verdict(amp, buffers={}, stopped={"buffers": "ValueError: not so"})
    assert (str(judged), failed) == ("not examined: buffers", [])


def test_a_count_is_compared_exactly(amp):
    judged, failed = verdict(amp, buffers=changed(amp, COUNT, whole="3"))
    assert (judged.cause, failed) == ("running statistics", [f"whole number, {COUNT}"])
    still = {name: b for name, b in amp.findings.buffers.items() if name != COUNT}
    assert "what it was at first" in verdict(amp, buffers=still)[0].because


def test_a_count_is_not_compared_that_moves_aside_from_the_steps(amp):
    replays = {name: replace(each, aside=[COUNT]) for name, each in amp.findings.replays.items()}
    judged, failed = verdict(amp, buffers=changed(amp, COUNT, whole="8"), replays=replays)
    assert (judged.word, failed) == ("same", [])


def test_whole_numbers_that_the_run_alone_moves_are_wrong(amp):
    table = replace(amp.findings.buffers[COUNT], whole="7")
    judged, failed = verdict(amp, buffers={**amp.findings.buffers, "table": table})
    assert (judged.cause, failed) == ("buffers", ["whole number, table"])
    assert judged.because == "table is 7 after training, and what it was at first in amp bf16"


def test_whole_numbers_in_which_correct_runs_differ_are_not_held_against_one(amp):
    first, *rest = amp.findings.noise
    other = {**first.buffers, COUNT: replace(first.buffers[COUNT], whole="5")}
    uncertain = replace(amp, findings=replace(amp.findings, noise=[replace(first, buffers=other), *rest]))
    assert verdict(uncertain, buffers=changed(amp, COUNT, whole="3"))[0].word == "same"


def test_a_moving_buffer_in_16_bits_has_a_cause_of_its_own(amp):
    judged, failed = verdict(amp, buffers=changed(amp, COUNT, dtype="bf16"))
    assert (judged.cause, failed) == ("buffers in 16 bits", [f"format of buffer, {COUNT}"])
    judged, failed = verdict(amp, buffers=changed(amp, MEAN, short=1.0))
    assert (judged.cause, failed) == ("buffers in 16 bits", ["digits of buffers"])


def test_statistics_far_beyond_the_noise_are_named_and_near_ones_are_not(amp):
    sketch = np.array(amp.findings.buffers[MEAN].sketch)
    noise = [np.linalg.norm(np.array(run.buffers[MEAN].sketch) - sketch) for run in amp.findings.noise]
    away = np.ones(len(sketch)) / np.sqrt(len(sketch))
    near = changed(amp, MEAN, sketch=(sketch + min(noise) * away).tolist())
    assert verdict(amp, buffers=near)[0].word == "same"
    far = changed(amp, MEAN, sketch=(sketch + 100 * max(noise) * away).tolist())
    judged, failed = verdict(amp, buffers=far)
    assert (judged.cause, failed) == ("running statistics", ["buffers after the run"])
    assert MEAN in judged.because
    lost = changed(amp, MEAN, sketch=[float("nan")] * len(sketch))
    assert verdict(amp, buffers=lost)[0].cause == "running statistics"


@pytest.mark.parametrize(("terms", "word"), [(0.0, "differs"), (1.0, "same")])
def test_rounded_inputs_move_a_mean_by_a_part_of_its_terms_which_cancel(amp, terms, word):
    """Neither buffer has noise, as the statistics of inputs have none."""
    one, norm = amp.findings.noise[0], np.linalg.norm(amp.findings.buffers[MEAN].sketch)
    without = {n: replace(b, sketch=amp.findings.buffers[n].sketch) for n, b in one.buffers.items()}
    first = amp.findings.replays["first"]
    place = replace(first.places[f"buffer {MEAN}"], terms=terms * norm, rounding=0.0)
    replays = {"first": replace(first, places={**first.places, f"buffer {MEAN}": place})}
    findings = replace(amp.findings, replays=replays, noise=[replace(one, buffers=without)] * 2)
    reference = replace(amp, findings=findings)
    number, *others = amp.findings.buffers[MEAN].sketch
    moved = changed(amp, MEAN, sketch=[number + 7 * 2.0**-9 * norm, *others])
    judged = judge_run(replace(reference, name="other", findings=replace(findings, buffers=moved)), reference)
    assert judged.word == word
    assert [check.name for check in judged.checks if not check.passed] == ["buffers after the run"] * (terms == 0)


def test_a_step_after_training_that_moves_them_otherwise_is_named(amp):
    error = amp.findings.last_buffers[MEAN]
    wrong = {**amp.findings.last_buffers, MEAN: replace(error, error=0.01 * error.norm)}
    judged, failed = verdict(amp, last_buffers=wrong)
    assert (judged.cause, failed) == ("running statistics", [f"buffer after training, {MEAN}"])


def test_buffers_of_no_norm_are_called_buffers(amp):
    layers = {**amp.findings.layers, MEAN: replace(amp.findings.layers[MEAN], kind="Router")}
    error = amp.findings.last_buffers[MEAN]
    wrong = {**amp.findings.last_buffers, MEAN: replace(error, error=0.01 * error.norm)}
    assert verdict(amp, last_buffers=wrong, layers=layers)[0].cause == "buffers"


def test_what_holds_inf_is_wrong_in_the_reference_too(amp):
    buffers = changed(amp, MEAN, sketch=[np.inf, *amp.findings.buffers[MEAN].sketch[1:]])
    judged = judge_run(poisoned := replace(amp, findings=replace(amp.findings, buffers=buffers)), poisoned)
    assert (judged.word, judged.cause) == ("differs", "running statistics")
    assert judged.because == f"{MEAN} holds inf or NaN after training, and no weight does"
    gone = {name: [np.nan] * len(sketch) for name, sketch in amp.findings.moved.items()}
    lost = replace(poisoned, findings=replace(poisoned.findings, moved=gone))
    assert not [check for check in judge_run(lost, lost).checks if check.name == f"numbers in buffer, {MEAN}"]


class MeanOfInputs(nn.Module):
    """Keeps the mean of its inputs, in whatever precision they arrive."""

    def __init__(self):
        super().__init__()
        self.hidden, self.output = nn.Linear(20, 32), nn.Linear(32, 5)
        self.register_buffer("mean", torch.zeros(20))

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.float().mean(0), 0.1)
        return self.output(nn.functional.gelu(self.hidden(x - self.mean)))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_statistics_of_inputs_are_as_coarse_as_these(precision):
    task = replace(MLP, model=MeanOfInputs)
    runs = {name: examined(name, BACKENDS[name], task, DATA, precision, steps=4, noise=2) for name in BOTH}
    means = [torch.tensor(runs[name].findings.buffers["mean"].sketch) for name in BOTH]
    assert not torch.equal(*means)
    assert judge_run(runs["master_weights"], runs["amp"]).word == "same"
