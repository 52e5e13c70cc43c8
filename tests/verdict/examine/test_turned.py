"""Units of an MLP that a rounding turns on or off are known beforehand, and no others are excused."""

from dataclasses import replace
from functools import cache

import torch
from support.judging import dataset_of, examined
from support.kinks import turn_a_unit
from support.tasks import make_task
from torch import nn

from mpcompare.backends.amp import Amp
from mpcompare.loss_scale import NoLossScale
from mpcompare.precision import PRECISIONS
from mpcompare.report.verdicts import judge_run
from mpcompare.tasks.data import batches
from mpcompare.tasks.mlp import plain_mlp
from mpcompare.verdict.examine import drive, turned
from mpcompare.verdict.examine.errors import gradient_errors
from mpcompare.verdict.examine.oracle import exact_step
from mpcompare.verdict.examine.subject import Subject

TASK = make_task(in_features=784, hidden=[64], out_features=10, batch_size=128, samples=128 * 8)
FP16 = PRECISIONS["fp16"]


class TurnsAUnit(Amp):
    """Turns a unit in each step, as whoever adds the bias to a product that was rounded may: Keras and Flax do."""

    def __init__(self, model, task, precision, loss_scale):
        super().__init__(model, task, precision, loss_scale)
        self.model.relu1.register_forward_pre_hook(turn_a_unit)


@cache
def amp():
    return examined("amp", Amp, TASK, dataset_of(TASK), "fp16", steps=4, noise=2)


def verdict():
    return judge_run(examined("turned", TurnsAUnit, TASK, dataset_of(TASK), "fp16", steps=4), amp())


def test_a_unit_that_a_rounding_turns_is_not_held_against_a_backend(monkeypatch):
    judged = verdict()
    assert judged.word == "same", judged.because
    monkeypatch.setattr(drive, "as_turned", lambda subject, batch, exact, grads, errors: exact)
    assert verdict().word == "differs"


def step():
    """Returns a subject, its first batch, and the oracle's step on it."""
    model = TASK.new_model(0, torch.device("cpu"))
    batch = TASK.micro_batches(*next(iter(batches(dataset_of(TASK), TASK.batch_size))))
    subject = Subject(lambda *_: None, model, NoLossScale(), FP16, TASK, lambda: iter([batch]))
    return subject, batch, exact_step(model, TASK.loss_fn, batch, FP16)


def with_unit_turned(subject, batch, exact, row, unit):
    """Returns the gradients with one unit of the only hidden layer turned."""
    units = turned._Units.of(subject, plain_mlp(subject.model, TASK), batch)
    change = units.passed[0][row, unit].double() * (1 - 2 * units.on[0][row, unit].double())
    grads = {name: g.clone() for name, g in exact.grads.items()}
    grads["layer1.weight"][unit] += change * units.inputs[0][row].double()
    grads["layer1.bias"][unit] += change
    return grads, bool(units.near[0][row, unit])


def test_the_unit_that_was_turned_is_found():
    subject, batch, exact = step()
    near = turned._Units.of(subject, plain_mlp(subject.model, TASK), batch).near[0].nonzero()
    assert 0 < len(near) < 20
    for row, unit in near[:3].tolist():
        grads, _ = with_unit_turned(subject, batch, exact, row, unit)
        found = turned.as_turned(subject, batch, exact, grads, gradient_errors(grads, exact.grads))
        torch.testing.assert_close(found.grads, grads, rtol=1e-5, atol=1e-9)


def test_a_unit_far_from_0_is_not_excused():
    subject, batch, exact = step()
    grads, near = with_unit_turned(subject, batch, exact, 0, 0)
    assert not near
    assert turned.as_turned(subject, batch, exact, grads, gradient_errors(grads, exact.grads)) is exact


def test_gradients_that_are_right_and_networks_with_a_twin_are_left_alone():
    subject, batch, exact = step()
    right = gradient_errors({name: g * (1 + 1e-4) for name, g in exact.grads.items()}, exact.grads)
    assert turned.as_turned(subject, batch, exact, exact.grads, right) is exact
    grads, _ = with_unit_turned(subject, batch, exact, 0, 0)
    wrong = gradient_errors(grads, exact.grads)
    twin = replace(subject, twin=nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.GELU(), nn.Linear(64, 10)))
    assert turned.as_turned(twin, batch, exact, grads, wrong) is exact
