"""The updates of a new backend, of which some elements of each tensor are compared."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from support.judging import dataset_of, examined
from support.tasks import make_task

from mpcompare.backends.amp import Amp
from mpcompare.tasks.optimizers import AdamW
from mpcompare.verdict.examine import numerics

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
