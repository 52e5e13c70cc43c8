"""Steps that are rare and right: parameters that take turns, a branch that begins at 0, a learning rate of 0."""

from dataclasses import replace

import pytest
import torch
from support.backends import BACKENDS
from support.judging import examined
from support.unusual import mlp, task_of
from torch import nn

from mpcompare.report.verdicts import judge_run
from mpcompare.tasks.optimizers import AdamW
from mpcompare.tasks.schedules import Cosine


class Counts(nn.Module):
    """Counts its steps in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("taken", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        out = self.step(int(self.taken), x)
        if self.training:
            self.taken += 1
        return out


class Turns(Counts):
    """Two networks without a common layer take turns."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(mlp(16, 8, 4) for _ in range(2))

    def step(self, taken, x):
        return self.parts[taken % 2](x)


class Later(Counts):
    """A branch whose last layer begins at 0 is switched on after a step. Its first layer has a gradient of 0 then."""

    def __init__(self):
        super().__init__()
        self.trunk, self.branch = nn.Linear(16, 4), mlp(16, 8, 4)
        nn.init.zeros_(self.branch[-1].weight)

    def step(self, taken, x):
        return self.trunk(x) + self.branch(x) if taken else self.trunk(x)


class MappedLater(Counts):
    """A function of torch.func calls a layer from the fourth step on."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def step(self, taken, x):
        return self.layer(x) if taken < 3 else torch.func.vmap(self.layer)(x)


class Looks(nn.Module):
    """A layer that is called in evaluation alone."""

    def __init__(self):
        super().__init__()
        self.layer, self.calibrated = nn.Linear(16, 4), nn.Linear(4, 4)

    def forward(self, x):
        out = self.layer(x)
        return out if self.training else self.calibrated(out)


class LooksFirst(BACKENDS["amp"]):
    """Evaluates its network before each step."""

    def forward(self, x, y):
        with torch.no_grad():
            self.model.eval()(x)
        self.model.train()
        return super().forward(x, y)


class OwnProduct(nn.Module):
    """The operands of its first product are in fp32 under autocast, so no sample of its last layer rounds one."""

    shift = 0.0

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Parameter(torch.randn(16, 16) / 4), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(torch.tanh(x @ self.first) + self.shift)


class Shifted(BACKENDS["master_weights"]):
    """The input of its last layer is 17 % off."""

    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        self.model.shift = 0.1


def run_of(make, backend=BACKENDS["amp"], schedule=None, steps=5, noise=0):
    task, data = task_of(make)
    task = replace(task, optimizer=AdamW(0.01, weight_decay=0.1), schedule=schedule or task.schedule)
    return examined("run", backend, task, data, "bf16", steps=steps, noise=noise)


@pytest.mark.parametrize(("make", "schedule"), [(Turns, None), (Later, None), (Later, Cosine(1))])
def test_amp_is_not_accused(make, schedule):
    run = run_of(make, schedule=schedule)
    assert [f"{check.name}: {check.because}" for check in judge_run(run, run).checks if not check.passed] == []


def test_the_reason_why_a_later_step_is_not_replayed_is_told():
    verdict = judge_run(run_of(MappedLater, BACKENDS["master_weights"]), run_of(MappedLater, noise=2))
    assert verdict.unchecked == ["layers after training (layer is called by a function of torch.func)"]


def test_a_layer_that_is_called_in_a_look_alone_hides_no_other_layer():
    findings = run_of(Looks, LooksFirst, steps=2).findings
    assert not findings.stopped
    assert "output layer" in findings.replays["first"].places


def test_what_arrives_at_a_layer_is_judged_though_the_reference_rounds_no_operand_of_it():
    reference = run_of(OwnProduct, steps=2, noise=2)
    assert judge_run(run_of(OwnProduct, BACKENDS["master_weights"], steps=2), reference).word == "same"
    wrong = judge_run(run_of(OwnProduct, Shifted, steps=2), reference)
    assert str(wrong) == "differs: forward pass"
    assert wrong.because.startswith("what arrives at last in the first step is 17 % off")
