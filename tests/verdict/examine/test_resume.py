"""The state of a backend after a load, compared with the saved state."""

import math
from dataclasses import replace

import pytest
import torch
from support.judging import dataset_of, examined
from support.tasks import make_task
from torch import nn

from mpcompare.backends.fp32 import Fp32
from mpcompare.report.verdicts import examined_of, judge_run
from mpcompare.tasks.optimizers import AdamW, Sgd
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.resume import lost_entries
from mpcompare.verdict.judge import resume
from mpcompare.verdict.judge.check import Case


def test_what_a_state_lost_is_listed():
    def state(**changes):
        found = {
            "params": {"w": torch.tensor([1.0, 0.0])},
            "buffers": {"mean": torch.zeros(2)},
            "optimizer": {"exp_avg": {"w": torch.ones(2)}, "step": {"w": torch.ones(())}},
            "loss_scale": {"scale": 4.0, "growth_tracker": 1},
        }
        return {**found, **changes}

    assert lost_entries(state(), state()) == []
    assert lost_entries(state(params={"w": torch.tensor([1.0, -0.0])}), state()) == ["params"]  # bit for bit
    other = state(optimizer={"exp_avg": {"w": torch.ones(2)}}, loss_scale={"scale": 2.0}, buffers={})
    assert lost_entries(state(), other) == [
        "buffers",
        "optimizer.step",
        "loss_scale.scale",
        "loss_scale.growth_tracker",
    ]
    assert lost_entries(other, state()) == ["loss_scale.scale"]  # a further entry is no loss


class Trembling(Fp32):
    """``fp32`` whose gradients vary by 2^-22, as the sums of a GPU's atomics do."""

    runs = 0

    def backward(self):
        super().backward()
        Trembling.runs += 1
        generator = torch.Generator().manual_seed(Trembling.runs)
        for g in self.grads().values():
            g.mul_(1 + 2.0**-22 * (2 * torch.rand(g.shape, generator=generator) - 1))


class ForgetsAStep(Trembling):
    """Takes the first step after a load at half the learning rate."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.loaded = True

    def step(self, lr):
        super().step(lr / 2 if getattr(self, "loaded", False) else lr)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [Sgd(0.05, 0.9), AdamW(1e-3)])
def test_sums_in_another_order_are_not_held_against_a_reload_in_fp32(optimizer):
    task = replace(make_task(in_features=784, hidden=[64], out_features=10), optimizer=optimizer, samples=32 * 8)
    data = dataset_of(task)
    fp32 = examined("fp32", Fp32, task, data, "fp32", steps=4, noise=2)

    def judged(backend):
        verdict = judge_run(examined("run", backend, task, data, "fp32", steps=4), fp32)
        return verdict, next(check for check in verdict.checks if check.name == "weights after a reload")

    verdict, weights = judged(Trembling)
    assert verdict.word == "same", verdict.because
    assert weights.value > 0
    verdict, weights = judged(ForgetsAStep)
    assert weights.value > 100 * weights.limit
    assert (verdict.word, verdict.cause) == ("differs", "resume")


class Large(nn.Module):
    """Counts its rows in a buffer that is far larger than its weights."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(20, 5)
        self.register_buffer("rows", torch.full((1000,), 1e6))

    def forward(self, x):
        self.rows += len(x)
        return self.linear(x)


class OffAfterALoad(Fp32):
    """Doubles a weight, or a number of a buffer, after a load."""

    part = "linear.bias"

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.loaded = True

    def step(self, lr):
        super().step(lr)
        if getattr(self, "loaded", False):
            {**self.master_params(), **self.buffers()}[self.part][0] *= 2


def test_a_large_buffer_hides_no_wrong_weight_and_is_compared_itself():
    task, data = replace(make_task(), model=Large), dataset_of(make_task())
    fp32 = examined("fp32", Fp32, task, data, "fp32", steps=2)
    assert fp32.findings.resume.weights < 10
    for part, name in (("linear.bias", "weights after a reload"), ("rows", "buffer a step after a reload, rows")):
        run = examined("run", type("Off", (OffAfterALoad,), {"part": part}), task, data, "fp32", steps=2)
        found = {check.name: check for check in resume.checks(Case(examined_of(run), examined_of(fp32)))}
        assert [each for each in found if "step" in each or "weights" in each if not found[each].passed] == [name]
        assert found[name].cause == "resume"


def test_a_mask_of_minus_infinity_is_no_distance():
    mask = torch.full((3, 3), -math.inf).triu(1)
    assert numerics.distance({"mask": mask}, {"mask": mask.clone()}) == 0
    assert numerics.distance({"mask": mask}, {"mask": mask - 2 * torch.eye(3)}) == pytest.approx(math.sqrt(12))
    assert numerics.finite_norm({"mask": mask + 2 * torch.eye(3)}) == pytest.approx(math.sqrt(12))
    assert numerics.distance({"mask": mask}, {"mask": torch.zeros(3, 3)}) == math.inf
