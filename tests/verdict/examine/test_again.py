"""Noise in the gradients of a backend. The noise is smaller than the roundings that are allowed."""

import math
from types import SimpleNamespace

import pytest
import torch
from support.judging import compared_with_amp, dataset_of, examined
from support.tasks import make_task

from mpcompare.backends.amp import Amp
from mpcompare.promises import Promises
from mpcompare.verdict.judge.again import Again, checks
from mpcompare.verdict.judge.check import Case

TASK = make_task(samples=32 * 12)
DATA = dataset_of(TASK)


class Noisy(Amp):
    """Adds noise to its gradients: a hundredth of a rounding to bf16."""

    def noise(self, like):
        return torch.randn(like.shape)

    def unscale(self):
        super().unscale()
        for p in self.model.parameters():
            p.grad.mul_(1 + 2**-15 * self.noise(p))


class NoisyByItself(Noisy):
    """Draws the noise from a generator of its own."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.generator = torch.Generator().manual_seed(0)

    def noise(self, like):
        return torch.randn(like.shape, generator=self.generator)


class SaysSo(NoisyByItself):
    promises = Promises(repeats=False)


def judged(backend):
    return compared_with_amp(backend, TASK, DATA, "bf16", steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [Noisy, NoisyByItself])
def test_noise_in_gradients_is_seen_in_their_bits(backend):
    verdict = judged(backend)
    assert (verdict.word, verdict.cause) == ("differs", "noise")
    assert [check.name for check in verdict.checks if not check.passed] == ["one step twice"]
    assert "gives other numbers, and amp bf16's does not" in verdict.because


@pytest.mark.slow
def test_who_says_so_differs_as_declared():
    verdict = judged(SaysSo)
    assert str(verdict) == "differs as declared: gives other bits each time"


def test_a_distance_that_is_no_number_fails_wherever_it_stands():
    def apart(distances):
        found = {"again": Again([], distances)}
        findings = SimpleNamespace(of_checks=found, promises=Promises(), masks=None, longest_sum=100)
        return SimpleNamespace(name="amp", findings=findings)

    for distances in ({"loss": 1e-9, "w": math.nan}, {"w": math.nan, "loss": 1e-9}):
        (check,) = checks(Case(apart(distances), apart({})))
        assert not check.passed


def test_amp_gives_the_same_bits_twice_also_with_masks_that_are_drawn():
    findings = examined("amp", Amp, TASK, DATA, "fp16", steps=3).findings
    again = findings.of_checks["again"]
    assert again.seen[0] == "loss"
    assert set(again.seen[1:]) == set(findings.first.finite.gradients)
    assert again.apart == {}
