"""The pass that makes gradients overflow, on a backend that is right."""

import math
from types import SimpleNamespace

import pytest
import torch
from support.backends import BACKENDS
from support.judging import dataset_of, examined
from support.tasks import make_task
from torch import nn

from mpcompare.loss_scale import DynamicLossScale, StaticLossScale
from mpcompare.verdict.examine import overflow

TASK = make_task(in_features=40, samples=32 * 25)
DATA = dataset_of(TASK)


@pytest.mark.slow
def test_an_overflow_is_skipped_and_what_follows_is_right():
    run = examined("scratch", BACKENDS["scratch"], TASK, DATA, "fp16", steps=3)
    steps = run.findings.overflow.steps
    assert [s.finite for s in steps] == [False, True, True, True, False, True]
    assert [s.skipped for s in steps] == [True, False, False, False, True, False]
    assert [s.moved for s in steps] == [False, True, True, True, False, True]
    scale = steps[0].loss_scale
    # The scale backs off by 2^-8, grows after two good steps, and backs off after the infinite input.
    assert [s.loss_scale / scale for s in steps] == [1, 2**-8, 2**-8, 2**-7, 2**-7, 2**-15]
    assert run.findings.overflow.next_scale.loss_scale == scale * 2**-15
    assert {name: e.error for name, e in run.findings.overflow.gradients.items()} == dict.fromkeys(
        run.findings.first.gradients, 0.0
    )  # the gradients of a new backend at the same weights and scale, bit for bit


def test_no_infinite_input_is_given_to_a_network_that_asserts_finite_ones():
    class Asserts(nn.Linear):
        def forward(self, x):
            assert x.isfinite().all()
            return super().forward(x)

    batch = [(torch.ones(4, 2), torch.zeros(4))]
    assert overflow._infinite(SimpleNamespace(network=lambda: Asserts(2, 1)), batch) is None
    (x, _), *_ = overflow._infinite(SimpleNamespace(network=lambda: nn.Linear(2, 1)), batch)
    assert x.isinf().all()


@pytest.mark.parametrize("largest", [3e-9, 0.02, 1.0, 1234.5])
def test_the_scale_that_is_too_large_is_just_too_large(largest):
    policy = overflow._too_large(DynamicLossScale(), largest)
    assert 1.04 * 65504 <= policy.init_scale * largest <= 2.11 * 65504
    assert math.log2(policy.init_scale).is_integer()


@pytest.mark.slow
def test_a_static_scale_and_one_with_a_floor_and_hysteresis_are_followed():
    for policy in (StaticLossScale(1024.0), DynamicLossScale(min_scale=1.0, hysteresis=2)):
        found = examined("scratch", BACKENDS["scratch"], TASK, DATA, "fp16", policy=policy, steps=3).findings
        steps = found.overflow.steps
        assert all(s.loss_scale == s.should_scale and s.skipped == s.should_skip for s in steps)
        assert not steps[0].finite


@pytest.mark.slow
@pytest.mark.parametrize("name", ["amp", "scratch", "fused", "master_weights"])
def test_without_a_loss_scale_the_step_with_an_infinite_input_is_taken(name):
    findings = examined(name, BACKENDS[name], TASK, DATA, "bf16", steps=3).findings
    assert findings.overflow is None
    (step,) = findings.infinite.steps
    assert (step.finite, step.skipped, step.should_skip, step.moved) == (False, False, False, True)
    assert len(findings.first.steps) == 1  # the step with the infinite input is not among them


def test_a_network_without_layers_has_no_scale_that_is_far_too_large():
    scaling, exact = DynamicLossScale(), SimpleNamespace(exponents={"gradients of activations": {}})
    assert overflow._far_too_large(nn.Linear(2, 1), scaling, exact) is scaling
