"""Verdicts on updates of optimizers that nobody here wrote."""

from dataclasses import replace

import pytest
import torch
from support.backends import BACKENDS
from support.judging import dataset_of, examined
from support.tasks import make_task

from mpcompare.backends.amp import Amp
from mpcompare.report.verdicts import judge_run
from mpcompare.tasks.any_optimizer import AnyOptimizer

TASK = make_task(samples=32 * 12)
DATA = dataset_of(TASK)
OPTIMIZERS = {
    "RAdam": AnyOptimizer("torch.optim.RAdam", 1e-2, 0.01),
    "NAdam": AnyOptimizer("torch.optim.NAdam", 1e-2, 0.01),
    "RMSprop": AnyOptimizer("torch.optim.RMSprop", 1e-3, settings={"momentum": 0.9, "centered": True}),
    "Adagrad": AnyOptimizer("torch.optim.Adagrad", 1e-2, settings={"initial_accumulator_value": 0.1}),
    "Adadelta": AnyOptimizer("torch.optim.Adadelta", 1.0),
    "ASGD": AnyOptimizer("torch.optim.ASGD", 1e-2),
    "Rprop": AnyOptimizer("torch.optim.Rprop", 1e-3),
    "a count in Python": AnyOptimizer("tasks.test_any_optimizer.CountsInPython", 1e-3, 0.1),
    "only a count": AnyOptimizer("tasks.test_any_optimizer.OnlyCounts", 1e-2),
    "Lion": AnyOptimizer("tasks.test_any_optimizer.Lion", 1e-3, 0.1),
}


class OnePercentLess(Amp):
    def step(self, lr):
        super().step(0.99 * lr)


class CoarseMoments(Amp):
    def step(self, lr):
        super().step(lr)
        for state in self.optimizer.state.values():
            for value in state.values():
                if torch.is_tensor(value) and value.dim():
                    value.copy_(value.bfloat16())


class Forgets(Amp):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "optimizer": {}})


def run(name, backend, optimizer, precision, noise=0):
    task = replace(TASK, optimizer=optimizer)
    return examined(name, backend, task, DATA, precision, steps=8, noise=noise)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_right_updates_are_the_same_and_wrong_ones_are_not(name, precision):
    amp = run("amp", Amp, OPTIMIZERS[name], precision, noise=1)
    assert str(judge_run(amp, amp)) == "reference"
    same = judge_run(run("masters", BACKENDS["master_weights"], OPTIMIZERS[name], precision), amp)
    assert str(same) == "same", same.because
    kinds = {check.kind for check in same.checks}
    assert {"optimizer", "trained", "aged", "midway", "resume"} & kinds >= {"optimizer", "trained", "resume"}
    wrong = [OnePercentLess, CoarseMoments, Forgets]
    words = [judge_run(run(each.__name__, each, OPTIMIZERS[name], precision), amp).word for each in wrong]
    if name == "Rprop":  # Rprop chooses the size of its steps itself
        words[0] = "differs"
    if name == "only a count":  # it has no moments
        words[1] = "differs"
    assert words == ["differs"] * 3
