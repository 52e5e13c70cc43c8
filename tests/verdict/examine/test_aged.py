"""The pass from an aged state, on backends that are right."""

from dataclasses import replace

import pytest
from support.backends import BACKENDS
from support.judging import dataset_of, examined
from support.marks import slow_after
from support.tasks import make_task

from mpcompare.tasks.optimizers import Adam, AdamW
from mpcompare.verdict.examine.aged import UPDATES

TASK = make_task(samples=32 * 12, momentum=0.9)
DATA = dataset_of(TASK)
ADAMS = [Adam(1e-3, weight_decay=0.1), AdamW(1e-3, (0.0, 0.999))]


def found(name, task, precision):
    return examined(name, BACKENDS[name], task, DATA, precision, steps=3).findings


@pytest.mark.parametrize("name", slow_after(1, ["amp", "scratch", "fused", "master_weights"]))
@pytest.mark.parametrize("optimizer", slow_after(1, [TASK.optimizer, *ADAMS]), ids=repr)
def test_the_loss_scale_grows_and_gradients_and_the_update_are_right(name, optimizer):
    findings = found(name, replace(TASK, optimizer=optimizer), "fp16")
    aged = findings.aged
    (step,) = aged.drive.steps
    assert aged.grows
    assert aged.drive.next_scale.loss_scale == aged.drive.next_scale.should_scale == 2 * step.loss_scale
    # The gradients of a new backend at the same weights and scale, bit for bit.
    assert {name: e.error for name, e in aged.drive.gradients.items()} == dict.fromkeys(findings.first.gradients, 0.0)
    (update,) = aged.drive.updates
    assert all(e.excess <= 1 for e in update.values())
    assert all(e.slope == pytest.approx(1, abs=1e-3) for e in update.values())
    assert aged.drive.known_mistakes == {}
    assert {c.count for c in aged.counts.values()} == (set() if optimizer is TASK.optimizer else {UPDATES + 1})


@pytest.mark.slow
def test_only_what_counts_is_aged():
    assert found("amp", TASK, "bf16").aged is None
    aged = found("amp", replace(TASK, optimizer=AdamW(1e-3)), "bf16").aged
    assert not aged.grows
    assert {(c.count, c.should_count, c.dtype) for c in aged.counts.values()} == {(UPDATES + 1, UPDATES + 1, "fp32")}
