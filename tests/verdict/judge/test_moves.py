"""Verdicts on single training steps, from records: only the reference is trained here."""

import math
from dataclasses import replace

import numpy as np
import pytest
from support.backends import BACKENDS
from support.judging import dataset_of, examined
from support.tasks import make_task

from mpcompare.report.runs import Run
from mpcompare.report.verdicts import judge_run

TASK, STEPS = make_task(samples=32 * 12), 6


@pytest.fixture(scope="module")
def amp() -> Run:
    return examined("amp", BACKENDS["amp"], TASK, dataset_of(TASK), "bf16", steps=STEPS, noise=2)


def verdict(amp, skipped=None, **changed):
    moves = replace(amp.findings.moves, **changed)
    steps = amp.steps if skipped is None else amp.steps.assign(skipped=skipped)
    judged = judge_run(replace(amp, name="other", steps=steps, findings=replace(amp.findings, moves=moves)), amp)
    return judged, [check.name for check in judged.checks if not check.passed]


def with_tensor(amp, name, **norms):
    """Returns the findings' norms of the change of each tensor, with other norms in some steps (``s3=0.0``)."""
    values = list(amp.findings.moves.tensors[name])
    for step, norm in norms.items():
        values[int(step[1:]) - 1] = norm
    return {**amp.findings.moves.tensors, name: values}


@pytest.mark.slow
def test_the_findings_hold_every_step(amp):
    for moves in (amp.findings.moves, *(run.moves for run in amp.findings.noise)):
        assert len(moves.steps) == len(moves.short) == STEPS
        assert all(len(norms) == STEPS and min(norms) > 0 for norms in moves.tensors.values())
        together = np.linalg.norm(list(moves.tensors.values()), axis=0)
        assert np.allclose(together, moves.steps, rtol=1e-4)
        assert max(moves.short) <= 1
    judged, failed = verdict(amp)
    assert (judged.word, failed) == ("same", [])


def test_a_tensor_that_stands_still_in_one_step_is_named(amp):
    judged, failed = verdict(amp, tensors=with_tensor(amp, "layer1.weight", s3=0.0))
    assert (judged.cause, failed) == ("update left out", ["every training step moves every tensor"])
    assert judged.because.startswith("training step 3 leaves layer1.weight as it is")


def test_updates_that_may_be_rounded_away_may_be_lost(amp):
    """The weights are so large compared with their update that fp32 rounds all of it away."""
    weights = dict.fromkeys(amp.findings.moves.weights, 10000000.0)
    tensors = with_tensor(amp, "layer1.weight", s3=0.0)
    assert verdict(amp, tensors=tensors, weights=weights)[0].word == "same"


def test_updates_of_rounding_errors_alone_may_be_lost(amp):
    """The norm of such an update is any number in a correct run."""
    first, *rest = amp.findings.noise
    norms = [norm * 10.0**place for place, norm in enumerate(first.moves.tensors["layer1.weight"])]
    moves = replace(first.moves, tensors={**first.moves.tensors, "layer1.weight": norms})
    noisy = replace(amp, findings=replace(amp.findings, noise=[replace(first, moves=moves), *rest]))
    assert verdict(noisy, tensors=with_tensor(amp, "layer1.weight", s3=0.0))[0].word == "same"


def test_a_tensor_that_stands_still_in_a_correct_run_may_do_so(amp):
    still = with_tensor(amp, "layer1.weight", s3=0.0)
    findings = replace(amp.findings, moves=replace(amp.findings.moves, tensors=still))
    assert verdict(replace(amp, findings=findings))[0].word == "same"


def test_weights_with_the_digits_of_16_bit_numbers_are_named(amp):
    short = amp.findings.moves.short
    assert verdict(amp, short=[*short[:2], short[2] + 9, *short[3:]])[0].word == "same"
    judged, failed = verdict(amp, short=[*short[:2], 200, *short[3:]])
    assert (judged.cause, failed) == ("no master weights", ["digits after training steps"])


@pytest.mark.parametrize(("reference", "most"), [(0, 34), (1, 40), (100, 337)])
def test_two_counts_of_short_numbers_may_be_as_far_apart_as_poissons_are(amp, reference, most):
    """With rates 2 to 1, and a ``reference`` count for one of them, the other count is beyond ``most`` in 1e-6 of all
    cases. The sum over the negative binomial distribution says so."""
    beyond = sum(math.comb(n + reference, n) * (2 / 3) ** n * (1 / 3) ** (reference + 1) for n in range(most + 1, 2000))
    assert beyond < 1e-6
    moves = replace(amp.findings.moves, short=[reference] * STEPS)
    amp = replace(amp, findings=replace(amp.findings, moves=moves))
    assert verdict(amp, short=[reference] * (STEPS - 1) + [most])[0].word == "same"
    assert verdict(amp, short=[reference] * (STEPS - 1) + [most + 1])[0].cause == "no master weights"


def test_a_skipped_step_that_moves_weights_is_named(amp):
    judged, failed = verdict(amp, skipped=[False] * (STEPS - 1) + [True])
    assert "weights in skipped training steps" in failed
    assert judged.cause == "skip"
    assert f"training step {STEPS} says that it skipped, and weights changed" in judged.because
