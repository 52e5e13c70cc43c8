"""The walk through a step: its phases in their order, however it is interrupted."""

import gc
import weakref
from types import SimpleNamespace

import torch

from mpcompare.contract import PHASES, Stepper, Walk, take_step
from mpcompare.phases import WHOLE_STEP
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.schedules import Constant, Rates


class Phased:
    """Notes its phases; the loss of a micro-batch is its input."""

    skipped = False
    task = SimpleNamespace(loss_fn=torch.nn.functional.mse_loss)

    def __init__(self):
        self.called = []

    def __getattr__(self, name):
        if name not in PHASES:
            raise AttributeError(name)

        def phase(*given):
            self.called.append(name)
            return given[0] if name == "forward" else None

        return phase


class Whole:
    skipped = False

    def train_step(self, batches, lr):
        return torch.tensor(7.0)


BATCH = [(torch.tensor(1.0), None), (torch.tensor(4.0), None)]
ORDER = ["forward", "backward", "forward", "backward", "unscale", "clip", "step", "update"]


def test_a_walk_yields_each_phase_when_it_is_done():
    backend, seen = Phased(), []
    walk = Walk(backend, BATCH, 0.1)
    for phase in walk:
        seen.append(phase)
        assert backend.called == seen
    assert seen == ORDER
    assert walk.loss == 2.5  # the mean over the micro-batches
    assert not walk.in_one_piece


def test_a_walk_goes_on_where_it_was_left():
    backend = Phased()
    walk = Walk(backend, BATCH, 0.1)
    walk.through("forward")
    assert (backend.called, walk.loss) == (ORDER[:1], 0.5)
    walk.through("unscale")
    assert backend.called == ORDER[:5]
    assert next(iter(walk)) == "clip"
    assert walk.finish() == 2.5
    assert backend.called == ORDER
    assert walk.finish() == 2.5  # nothing is left
    assert backend.called == ORDER


def test_a_step_in_one_piece_is_one_phase():
    walk = Walk(Whole(), BATCH, 0.1)
    assert walk.in_one_piece
    assert list(walk) == [WHOLE_STEP]
    assert walk.loss == 7
    walk = Walk(Whole(), BATCH, 0.1)
    walk.through("unscale")
    assert walk.loss == walk.finish() == take_step(Whole(), BATCH, 0.1) == 7


def test_a_step_is_counted_once_and_at_its_end():
    for backend in (Phased(), Whole()):
        stepper = Stepper(backend, Rates(Sgd(0.1).lr, Constant()))
        walk = stepper.walk(BATCH)
        walk.through("clip")
        assert stepper.rates.updates == int(walk.in_one_piece)
        walk.finish()
        walk.finish()
        assert stepper.rates.updates == 1


def test_a_walk_that_is_left_keeps_no_backend():
    gc.disable()
    try:
        backend = Phased()
        gone = weakref.ref(backend)
        walk = Walk(backend, BATCH, 0.1)
        walk.through("unscale")
        del backend, walk
        assert gone() is None
    finally:
        gc.enable()
