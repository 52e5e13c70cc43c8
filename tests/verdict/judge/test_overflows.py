"""Overflows of a backend that computes its batches in parts, and of one that hides them."""

import pytest
import torch
from support.backends import BACKENDS
from support.correct import SplitBatch
from support.judging import dataset_of, examined
from support.marks import slow_after
from support.tasks import make_task

from mpcompare.backends.amp import Amp
from mpcompare.loss_scale import DynamicLossScale, StaticLossScale
from mpcompare.report.verdicts import judge_run

TASK = make_task(in_features=784, hidden=[64], out_features=10, batch_size=64, samples=64 * 20)
DATA = dataset_of(TASK)


class InParts(SplitBatch):
    PARTS = 64


class Finite(Amp):
    """Replaces inf and NaN, and never skips a step."""

    def unscale(self):
        for p in self.model.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
        super().unscale()


def judged(backend, policy):
    amp = examined("amp", BACKENDS["amp"], TASK, DATA, "fp16", steps=20, noise=2, policy=policy)
    run = examined("run", backend, TASK, DATA, "fp16", steps=20, policy=policy)
    return amp.findings, run.findings, judge_run(run, amp)


@pytest.mark.parametrize("backend", slow_after(1, [SplitBatch, InParts]))
@pytest.mark.parametrize("policy", [DynamicLossScale(2.0**24), DynamicLossScale(), StaticLossScale(256.0)])
def test_a_batch_in_parts_overflows_at_a_larger_scale_and_is_right(backend, policy):
    amp, run, verdict = judged(backend, policy)
    assert verdict.word == "same", verdict.because
    assert not run.overflow.steps[0].finite
    assert [s.finite for s in run.overflow.steps] == [s.finite for s in amp.overflow.steps]
    if backend is InParts:
        assert run.overflow.steps[0].loss_scale > amp.overflow.steps[0].loss_scale
        if isinstance(policy, DynamicLossScale):  # both back off to one scale
            assert run.overflow.steps[1].loss_scale == amp.overflow.steps[1].loss_scale
    if policy == DynamicLossScale(2.0**24) and backend is InParts:
        assert run.first.first_scale > amp.first.first_scale


def test_gradients_that_never_overflow_are_found_at_any_scale():
    _, run, verdict = judged(Finite, DynamicLossScale())
    assert run.overflow.steps[0].finite
    assert verdict.word == "differs", verdict
    assert {check.kind for check in verdict.checks if not check.passed} >= {"overflows"}
    assert torch.isfinite(torch.tensor(run.overflow.first_scale))
