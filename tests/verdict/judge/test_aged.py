"""Mistakes that only an aged state shows."""

from dataclasses import replace

import pytest
import torch
from support.backends import BACKENDS
from support.judging import dataset_of, examined
from support.tasks import make_task

from mpcompare.backends.amp import Amp
from mpcompare.backends.master_weights import MasterWeights
from mpcompare.report.verdicts import judge_run
from mpcompare.tasks.optimizers import AdamW

TASK = make_task(samples=32 * 12)
DATA = dataset_of(TASK)


class UnscalesByTheNextScale(MasterWeights):
    """Divides by the scale of the next step, which differs where the scale grows."""

    def unscale(self):
        scaled = [master.grad for master in self.masters.values()]
        self.found_inf = self.scaling.found_inf(scaled)
        self.scaling.update(self.found_inf)
        for g in scaled:
            g.mul_(self.scaling.inv_scale)

    def update(self):
        self.optimizer.zero_grad(set_to_none=True)


class DoesNotGrow(MasterWeights):
    """Never grows its loss scale again once its count of good steps is large."""

    def update(self):
        scale, tracker = self.scaling.scale, self.scaling.growth_tracker
        super().update()
        if tracker > 1000:
            self.scaling.scale = scale


class CountsIn16Bits(Amp):
    dtype = torch.float16

    def step(self, lr):
        super().step(lr)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].to(self.dtype)


class CorrectsForFewer(Amp):
    """Corrects for 300 updates at most."""

    def step(self, lr):
        counts = {p: state["step"].clone() for p, state in self.optimizer.state.items()}
        for p, count in counts.items():
            self.optimizer.state[p]["step"] = count.clamp(max=300)
        super().step(lr)
        for p, count in counts.items():
            self.optimizer.state[p]["step"] = count + 1


def verdict(backend, task, precision):
    amp = examined("amp", BACKENDS["amp"], task, DATA, precision, steps=4)
    assert judge_run(amp, amp).word == "reference"
    return judge_run(examined("wrong", backend, task, DATA, precision, steps=4), amp)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "precision", "cause", "because"),
    [
        (
            UnscalesByTheNextScale,
            "fp16",
            "gradient scaled",
            "the gradients of the first step are right, and in the step after which the loss scale grows every "
            "gradient is 0.5 times what it should be",
        ),
        (DoesNotGrow, "fp16", "loss scale", "loss scale 65536 after pass aged, where the policy says 131072"),
        (CountsIn16Bits, "bf16", "bias correction", "counts 2048 updates of layer1.weight after update 2049, in fp16"),
        (CorrectsForFewer, "bf16", "optimizer", "the update of layer1.weight is 0.546"),
    ],
)
def test_what_shows_only_after_long_training_is_named(backend, precision, cause, because):
    task = replace(TASK, optimizer=AdamW(1e-3)) if precision == "bf16" else TASK
    judged = verdict(backend, task, precision)
    assert (judged.word, judged.cause) == ("differs", cause), judged.because
    assert because in judged.because
    failed = {check.kind for check in judged.checks if not check.passed}
    assert failed == {"aged"}
