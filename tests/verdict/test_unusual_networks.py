"""Networks that keep a state, differentiate themselves or cast their numbers are judged, and nobody is accused."""

import pytest
import torch
from support.backends import BACKENDS
from support.judging import examined
from support.marks import slow_after
from support.trees import HalvesGradients
from support.unusual import NETWORKS, Forward, Growing, Mapped, Operator, Pinn, Queue, task_of

from mpcompare.report.verdicts import judge_run
from mpcompare.tasks.trial import try_out
from mpcompare.verdict.examine import last

HIDDEN = {
    Mapped: "body is called by a function of torch.func",
    Forward: "body is called by a function of torch.func",
    Pinn: "the network asks for a gradient at",
}

# They differentiate themselves, have complex weights, and make buffers.
FEW = [Pinn, Operator, Growing]


@pytest.mark.parametrize("precision", slow_after(1, ["bf16", "fp16", "fp32"]))
@pytest.mark.parametrize("make", slow_after(1, [*FEW, *(each for each in NETWORKS if each not in FEW)]))
def test_right_backends_are_not_accused_and_halved_gradients_are_seen(make, precision):
    task, data = task_of(make)
    name = "fp32" if precision == "fp32" else "amp"
    reference = examined(name, BACKENDS[name], task, data, precision, steps=6, noise=2)
    assert not reference.findings.stopped
    hidden = reference.findings.hidden
    assert all(why.startswith(HIDDEN.get(make, "none")) for why in hidden.values())
    assert ("layers" in hidden) == (make in HIDDEN)
    verdict = judge_run(reference, reference)
    assert verdict.word == "reference", verdict.because
    if precision == "fp32":
        return
    right = judge_run(examined("mw", BACKENDS["master_weights"], task, data, precision, steps=6), reference)
    assert right.word in ("same", "not seen"), f"{right}: {right.because}"
    assert any(said.startswith("each layer by itself (") for said in right.unchecked) == (make in HIDDEN)
    wrong = judge_run(examined("halved", HalvesGradients, task, data, precision, steps=6), reference)
    assert wrong.word == "differs"


@pytest.mark.parametrize("make", NETWORKS)
def test_each_may_be_trained(make):
    task, data = task_of(make)
    try_out(task.new_model(0, torch.device("cpu")), task, data.x_train, data.y_train, "unusual", data.y_test)


@pytest.mark.slow
def test_a_replay_that_stops_costs_neither_the_update_nor_the_step(monkeypatch):
    """Timed steps are compared with steps of the trained backend. If it had left out a step, they would be accused."""

    def stops(*_):
        raise ArithmeticError("no replay")

    monkeypatch.setattr(last, "layers_of", stops)
    task, data = task_of(Queue)
    run = examined("amp", BACKENDS["amp"], task, data, "bf16", steps=3)
    assert run.findings.stopped == {"layers after training": "ArithmeticError: no replay"}
    assert run.findings.trained is not None


@pytest.mark.slow
def test_the_trained_backend_takes_its_step_whatever_stops_before_its_end(monkeypatch):
    def stops(*_):
        raise ArithmeticError("no comparison")

    steps = []

    class Counts(BACKENDS["amp"]):
        def step(self, lr):
            steps.append(id(self))
            super().step(lr)

    monkeypatch.setattr(last, "idle", stops)
    task, data = task_of(Queue)
    run = examined("amp", Counts, task, data, "bf16", steps=3)
    assert "last" in run.findings.stopped
    assert steps.count(steps[0]) == 4
