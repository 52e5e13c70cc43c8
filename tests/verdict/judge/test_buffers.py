"""Running statistics after a skipped step: torch moves them in forward, before the step is skipped."""

from dataclasses import replace

import pytest
from support.backends import BACKENDS
from support.correct import ExplicitCasts
from support.judging import compared_with_amp, dataset_of
from support.tasks import make_task
from torch import nn

from mpcompare.backends.amp import Amp
from mpcompare.backends.torch_model import copy_into

TASK = make_task(samples=32 * 12)
DATA = dataset_of(TASK)


def network():
    return nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 5))


NORMED = replace(TASK, model=network)


class PutsBack(Amp):
    """Puts its statistics back where a step is skipped."""

    def forward(self, x, y):
        self.before = {name: b.clone() for name, b in self.buffers().items()}
        return super().forward(x, y)

    def update(self):
        super().update()
        if self.skipped:
            copy_into(self.buffers(), self.before)


def judged(backend):
    return compared_with_amp(backend, NORMED, DATA, "fp16", steps=3)


def test_statistics_that_a_skip_puts_back_are_named():
    verdict = judged(PutsBack)
    assert (verdict.word, verdict.cause) == ("differs", "running statistics"), verdict.because
    failed = [check for check in verdict.checks if not check.passed]
    assert {check.tensor for check in failed} == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert {check.place for check in failed} == {"buffer after a skipped step"}


@pytest.mark.slow
def test_statistics_that_move_in_a_skipped_step_are_right():
    for backend in (BACKENDS["master_weights"], ExplicitCasts):
        verdict = judged(backend)
        assert verdict.word == "same", verdict.because
        assert any(check.name == "buffer after a skipped step, 1.running_var" for check in verdict.checks)
