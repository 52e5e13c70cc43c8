"""The run as a whole: in fp32, where a unit may turn in one run and in no other, and where updates have no bound."""

from dataclasses import replace
from functools import partial

import pytest
from support.backends import BACKENDS
from support.foreign import STEPS, UNet, maps
from support.judging import dataset_of, examined
from support.kinks import turn_a_unit
from support.tasks import make_task
from torch import Tensor

from mpcompare.backends.fp32 import Fp32
from mpcompare.report.runs import Run
from mpcompare.report.verdicts import judge_run
from mpcompare.tasks.optimizers import AdamW, Sgd
from mpcompare.tasks.task import Task
from mpcompare.verdict.judge.limits import FP32

TASK = Task(partial(UNet, 4), "cross_entropy", Sgd(0.05, 0.9), 8)


@pytest.fixture(scope="module")
def fp32() -> Run:
    """Returns the reference, with four noise runs: a unit may turn in one of them, too."""
    return examined("fp32", Fp32, TASK, maps(8 * STEPS), "fp32", steps=STEPS, noise=4)


class TurnsAUnit(Fp32):
    """Turns one unit of the last relu in the fourth step."""

    steps = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        TurnsAUnit.steps += 1
        if TurnsAUnit.steps != 4:
            return super().forward(x, y)
        with self.model.joined[-1][-1].register_forward_pre_hook(turn_a_unit):
            return super().forward(x, y)


class LeavesRowsOut(Fp32):
    """Leaves half of the rows out once in training, in a step that nobody examines."""

    steps = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        LeavesRowsOut.steps += 1
        half = LeavesRowsOut.steps == 4
        return super().forward(x[:4], y[:4]) if half else super().forward(x, y)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "said"), [(TurnsAUnit, "same"), (LeavesRowsOut, "differs: run")])
def test_a_jump_at_a_kink_is_no_difference_and_a_step_on_other_rows_is_one(fp32, backend, said):
    verdict = judge_run(examined("run", backend, TASK, maps(8 * STEPS), "fp32", steps=STEPS), fp32)
    assert str(verdict) == said, verdict.because
    loss = next(check for check in verdict.checks if check.name == "loss over the run")
    assert loss.value > 4 * FP32 * fp32.steps["loss"].max()  # roundings alone make less


@pytest.mark.parametrize(("betas", "compared"), [((0.9, 0.999), True), ((0.9, 0.0), False)])
def test_training_is_compared_where_updates_have_a_bound(betas, compared):
    task = make_task(samples=32 * 8, batch_size=32)
    task = replace(task, optimizer=AdamW(1e-3, betas))
    amp = examined("amp", BACKENDS["amp"], task, dataset_of(task), "bf16", steps=4, noise=2)
    worse = replace(amp, name="worse", steps=amp.steps.assign(loss=amp.steps["loss"] + 30))
    verdict = judge_run(worse, amp)
    assert (verdict.cause == "run") is compared
    assert ("training from step 1 on, where correct runs part" in verdict.unchecked) is not compared
