"""Overflows of a backend that computes its batches in parts, and of a backend that hides overflows."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.backends import BACKENDS
from support.correct import SplitBatch
from support.judging import dataset_of, examined
from support.tasks import make_task

from mpcompare.backends.amp import Amp
from mpcompare.loss_scale import DynamicLossScale, StaticLossScale
from mpcompare.report.verdicts import judge_run
from mpcompare.verdict.judge.overflow import _without_need

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


@pytest.mark.slow
@pytest.mark.parametrize("backend", [SplitBatch, InParts])
@pytest.mark.parametrize("policy", [DynamicLossScale(), DynamicLossScale(2.0**24), StaticLossScale(256.0)])
def test_a_batch_in_parts_overflows_at_a_larger_scale_and_is_right(backend, policy):
    amp, run, verdict = judged(backend, policy)
    assert verdict.word == "same", verdict.because
    assert not run.overflow.steps[0].finite
    assert [s.finite for s in run.overflow.steps] == [s.finite for s in amp.overflow.steps]
    if backend is InParts:
        assert run.overflow.steps[0].loss_scale > amp.overflow.steps[0].loss_scale
        if isinstance(policy, DynamicLossScale):  # both scales back off to the same scale
            assert run.overflow.steps[1].loss_scale == amp.overflow.steps[1].loss_scale
    if policy == DynamicLossScale(2.0**24) and backend is InParts:
        assert run.first.first_scale > amp.first.first_scale


@pytest.mark.slow
def test_gradients_that_never_overflow_are_found_at_any_scale():
    _, run, verdict = judged(Finite, DynamicLossScale())
    assert run.overflow.steps[0].finite
    assert verdict.word == "differs", verdict
    assert {check.kind for check in verdict.checks if not check.passed} >= {"overflow"}
    assert torch.isfinite(torch.tensor(run.overflow.first_scale))


@pytest.mark.parametrize("bounded", [True, False])
def test_after_an_update_without_a_bound_overflows_are_not_compared(bounded):
    amp = examined("amp", BACKENDS["amp"], TASK, DATA, "fp16", steps=4, noise=2)

    def overflows(findings):
        recipe = replace(findings.recipe, bounded=bounded)
        own, reference = (replace(amp, findings=replace(each, recipe=recipe)) for each in (findings, amp.findings))
        checks = judge_run(replace(own, name="other"), reference).checks
        return next(check for check in checks if check.name == "overflows of pass overflow")

    steps = amp.findings.overflow.steps
    taken = next(number for number, step in enumerate(steps) if step.finite)
    for number, passes in ((taken, False), (taken + 1, not bounded)):
        other = [replace(step, finite=step.finite ^ (at == number)) for at, step in enumerate(steps)]
        drive = replace(amp.findings.overflow, steps=other)
        assert overflows(replace(amp.findings, overflow=drive)).passed is passes


def test_an_overflow_is_right_where_the_exact_gradients_overflow_at_its_loss_scale():
    """A gradient of 20 fits fp16 at a loss scale of 2048, and not at 4096."""
    steps = [SimpleNamespace(finite=scale < 512, loss_scale=scale) for scale in (8192, 4096, 2048, 1024, 512, 256)]
    first = SimpleNamespace(gradients={"a": SimpleNamespace(largest=20.0), "b": None})
    of = SimpleNamespace(precision="fp16", findings=SimpleNamespace(first=first))
    assert _without_need(SimpleNamespace(run=of, reference=of), steps) == 3


@pytest.mark.slow
def test_what_only_the_reference_holds_in_fp32_overflows_at_a_scale_that_is_too_large():
    amp = examined("amp", BACKENDS["amp"], TASK, DATA, "fp16", steps=4, noise=2)
    first, *others = amp.findings.overflow.steps

    def with_first(step):
        drive = replace(amp.findings.overflow, steps=[step, *others])
        return replace(amp, findings=replace(amp.findings, overflow=drive))

    for scale, passes in ((first.loss_scale, True), (first.loss_scale / 2.0**10, False)):
        run = replace(with_first(replace(first, loss_scale=scale)), name="other")
        checks = judge_run(run, with_first(replace(first, finite=True))).checks
        assert next(check for check in checks if check.name == "overflows of pass overflow").passed is passes
