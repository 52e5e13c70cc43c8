"""Losses and slopes from mask to mask, judged on records."""

import math
from dataclasses import replace

import pytest
from planted.judged import reference
from planted.mlp import MLP

from mpcompare.report.verdicts import judge_run
from mpcompare.verdict.judge.masks import Masks, MaskSamples

LOSSES, SLOPES = [2.0, 2.1, 1.9, 2.05, 1.95, 2.2, 1.8, 2.0], [1.0, 0.9, 1.1, 0.95, 1.05, 0.8, 1.2, 1.0]


def verdict_on(**changes):
    """Returns the verdict on a correct run that draws masks of its own, with these changes of the samples."""
    _, _, amp = reference(MLP, "bf16")
    samples = replace(MaskSamples([2.02, 1.97], LOSSES, [0.98, 1.04], SLOPES), **changes)
    run = replace(amp, findings=replace(amp.findings, masks=Masks(False, samples)))
    return judge_run(run, amp)


@pytest.mark.slow
def test_a_run_whose_steps_vary_as_the_networks_is_not_accused():
    for changes in ({}, {"slopes": []}, {"losses": [math.inf, 2.0]}):
        verdict = verdict_on(**changes)
        assert verdict.word == "same", verdict.because
        assert verdict.unchecked == ["training (it draws other random numbers, such as masks of dropout)"]
        assert "run" not in {check.kind for check in verdict.checks}


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"losses": [2.0, 2.0]}, "the loss of the first step is 2 whatever the random numbers are"),
        ({"losses": [3.5, 3.6]}, "with masks of its own the loss is 3.55 on average, and the network's is 2"),
        ({"losses": [math.nan, math.inf]}, "with masks of its own the loss is nan on average"),
        ({"slopes": [2.5, 2.7]}, "the gradient along the mean gradient is 2.6 on average, and the network's is 1"),
    ],
)
def test_dropout_that_is_off_or_wrong_is_found(changes, because):
    verdict = verdict_on(**changes)
    assert (verdict.word, verdict.cause) == ("differs", "dropout")
    assert because in verdict.because


def test_masks_that_do_nothing_to_the_loss_prove_nothing():
    """A network whose last layer is 0 at first has such masks."""
    assert verdict_on(losses=[2.0, 2.0], exact_losses=[2.0] * 8).word == "same"
