"""Weights that are declared to be rounded at random. Some are, and some are not."""

import pytest
import torch
from planted.real.wholly import stochastically_rounded, truncated
from support.judging import compared_with_amp, dataset_of
from support.tasks import make_task

from mpcompare.backends.peers.bf16_weights import Bf16Weights
from mpcompare.promises import Promises
from mpcompare.verdict.examine.errors import far_from

TASK = make_task(in_features=30, hidden=[24], samples=32 * 12, momentum=0.9)


class AtRandom(Bf16Weights):
    """SGD of bf16 weights that rounds the new weights at random."""

    rounded = staticmethod(stochastically_rounded)

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.promises = Promises(weights="bf16", rounding="stochastic", moments="bf16")

    def step(self, lr):
        before = [p.detach().float() for p in self.model.parameters()]
        super().step(lr)
        with torch.no_grad():
            for p, w in zip(self.model.parameters(), before, strict=True):
                p.copy_(self.rounded(w - lr * self.optimizer.state[p]["momentum_buffer"].float()))


class ToNearest(AtRandom):
    rounded = staticmethod(torch.Tensor.bfloat16)


class CutOff(AtRandom):
    rounded = staticmethod(truncated)


def judged(backend):
    return compared_with_amp(backend, TASK, dataset_of(TASK), "bf16", steps=3)


def test_rounding_at_random_is_seen():
    verdict = judged(AtRandom)
    assert str(verdict) == "differs as declared: no master weights, rounded at random, moments in bf16", verdict.because


@pytest.mark.slow
@pytest.mark.parametrize("backend", [ToNearest, CutOff])
def test_rounding_in_another_way_is_no_rounding_at_random(backend):
    verdict = judged(backend)
    assert (verdict.word, verdict.cause) == ("differs", "promise")
    assert "weights are rounded to the farther neighbour" in verdict.because


def test_the_farther_neighbours_are_counted_by_the_gaps_of_bf16():
    exact = torch.tensor([1.0, 1 + 2**-9, -(1 + 2**-9), 4 + 2**-7, 1 + 2**-8], dtype=torch.float64)
    new = torch.tensor([1.0, 1 + 2**-7, -1.0, 4 + 2**-5, 1.0], dtype=torch.float64)
    assert far_from(exact, new) == (2, 0.75)  # three are a quarter of a gap away, and one is halfway


def test_rounding_at_random_goes_as_far_as_it_should():
    exact = 1 + torch.rand(100_000, generator=torch.Generator().manual_seed(1)).double()
    torch.manual_seed(0)
    far, should_far = far_from(exact, stochastically_rounded(exact.float()).double())
    assert abs(far - should_far) < 4 * should_far**0.5
    assert should_far == pytest.approx(100_000 * 0.8 * 0.25, rel=0.02)
