"""The updates of a new backend, of which some elements of each tensor are compared, and its steps."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from support.judging import dataset_of, examined
from support.mutations import subject_of
from support.tasks import make_task

from mpcompare.backends.amp import Amp
from mpcompare.loss_scale import NoLossScale
from mpcompare.tasks.optimizers import AdamW, Sgd
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.drive import Driver

TASK = replace(make_task(samples=32 * 12), optimizer=AdamW(1e-3))
DATA = dataset_of(TASK)


class LeavesRows(Amp):
    """Does not update the last rows of each matrix."""

    def step(self, lr):
        before = {p: p.detach()[-2:].clone() for p in self.model.parameters() if p.dim() == 2}
        super().step(lr)
        with torch.no_grad():
            for p, rows in before.items():
                p[-2:] = rows


@pytest.mark.parametrize(
    ("backend", "is_right"), [(Amp, True), pytest.param(LeavesRows, False, marks=pytest.mark.slow)]
)
def test_some_elements_of_each_tensor_tell_of_its_updates(backend, is_right):
    with mock.patch.object(numerics, "SPREAD", 50):
        found = examined("run", backend, TASK, DATA, "bf16", steps=3).findings
    for drive in (found.first, found.aged.drive):
        worst = {name: max(update[name].excess for update in drive.updates) for name in drive.updates[0]}
        assert all((excess <= 1) == (is_right or name.endswith("bias")) for name, excess in worst.items())


class TakesNone(Amp):
    """Leaves all weights as they are."""

    def step(self, lr):
        pass


@pytest.mark.parametrize(
    ("backend", "rate", "at_rest"), [(Amp, 0.1, False), (TakesNone, 0.1, False), (TakesNone, 1e-30, True)]
)
def test_a_step_that_fp32_rounds_away_need_not_move_weights(backend, rate, at_rest):
    task = replace(TASK, optimizer=Sgd(rate))
    driver = Driver(subject_of(SimpleNamespace(task=task, dataset=DATA), "bf16", backend), NoLossScale())
    driver.take(driver.subject.first_batch)
    (step,) = driver.found.steps
    assert (step.moved, step.at_rest) == (backend is Amp, at_rest)
