"""An update in the middle of training is kept as it was, and replayed."""

from dataclasses import replace

import pytest
import torch
from support.backends import BACKENDS
from support.correct import WholeStep
from support.judging import dataset_of, examined
from support.marks import slow_after
from support.tasks import make_task

from mpcompare.backends.amp import Amp
from mpcompare.contract import Stepper
from mpcompare.loss_scale import DynamicLossScale, NoLossScale
from mpcompare.tasks.optimizers import AdamW, Sgd
from mpcompare.tasks.schedules import Constant, Cosine, Warmup
from mpcompare.verdict.examine.midway import Midway, middle

ANOTHER_RATE = "at another learning rate than that of the schedule, right apart from that"
MLP = make_task(in_features=20, hidden=[16], out_features=5, batch_size=32, samples=32 * 8)
TASK = replace(MLP, optimizer=AdamW(1e-3, weight_decay=0.1), schedule=Cosine(8, 2))
DATA = dataset_of(MLP)
BATCH = [(DATA.x_train[:32], DATA.y_train[:32])]


def test_the_step_lies_between_the_peak_and_the_end():
    assert middle(Constant(), 0, 100) is None
    assert middle(Cosine(12), 0, 12) == 7
    assert middle(Cosine(12, 8), 0, 12) == 10  # the warm-up ends at the eighth update, whose number is 7
    assert middle(Warmup(4), 0, 12) == 8
    assert middle(Cosine(12), 8, 12) == 11  # in a run that resumed
    assert middle(Cosine(1), 0, 1) == 1


def midway(backend_class, task=TASK, scaling=None, steps=8):
    backend = backend_class(task.new_model(0, torch.device("cpu")), task, "bf16", scaling or NoLossScale())
    stepper = Midway(Stepper(backend, task.new_rates()), task.schedule, 0, steps)
    return backend, stepper


def test_training_is_the_same_bit_for_bit():
    _, watched = midway(Amp)
    other, _ = midway(Amp)
    plain = Stepper(other, TASK.new_rates())
    for _ in range(8):
        assert torch.equal(watched.step(BATCH), plain.step(BATCH))
    assert all(torch.equal(p, other.master_params()[name]) for name, p in watched.backend.master_params().items())
    assert int(watched.rates.updates) == int(plain.rates.updates) == 8


def test_the_update_is_kept_with_all_that_it_is_made_of():
    backend, stepper = midway(Amp)
    before = None
    for number in range(1, 9):
        if number == 5:
            before = {name: p.detach().clone().flatten() for name, p in backend.master_params().items()}
        assert (stepper.kept is None) == (number <= 5)
        stepper.step(BATCH)
    kept = stepper.kept
    assert (kept.updates, kept.steps, kept.lr) == (4, 4, pytest.approx(TASK.schedule.factor(4) * 1e-3))
    assert all(torch.equal(kept.before[name], p) for name, p in before.items())
    assert set(kept.optimizer) == {"exp_avg", "exp_avg_sq"}
    assert all(int(count) == 4 for count in kept.counts.values())
    assert not torch.equal(kept.after["layer1.weight"], kept.before["layer1.weight"])


def test_a_step_that_is_skipped_is_no_update():
    class Skips(Amp):
        taken = 0

        def step(self, lr):
            self.taken += 1
            super().step(lr)
            self.skipped = self.taken == 5

    _, stepper = midway(Skips, scaling=DynamicLossScale(2.0))
    for _ in range(8):
        stepper.step(BATCH)
    assert (stepper.kept.steps, stepper.kept.updates) == (5, 4)


class TooFast(Amp):
    """The rate is twice as large after the warm-up."""

    taken = 0

    def step(self, lr):
        self.taken += 1
        super().step(2 * lr if self.taken > 2 else lr)


class DecaysMore(Amp):
    """The decay is ten times as large after the warm-up."""

    taken = 0

    def step(self, lr):
        self.taken += 1
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1 if self.taken <= 3 else 1.0
        super().step(lr)


def found(backend, task=TASK):
    return examined("run", backend, task, DATA, "bf16", steps=8).findings.midway


@pytest.mark.parametrize("backend", [Amp, BACKENDS["scratch"], WholeStep])
@pytest.mark.parametrize("optimizer", slow_after(1, [TASK.optimizer, Sgd(0.1, 0.9)]))
@pytest.mark.parametrize("clip_norm", slow_after(1, [0.1, None]))
def test_right_updates_are_within_their_roundings(backend, optimizer, clip_norm):
    drive = found(backend, replace(TASK, optimizer=optimizer, clip_norm=clip_norm))
    (update,) = drive.updates
    assert set(update) == {"layer1.weight", "layer1.bias", "layer2.weight", "layer2.bias"}
    assert all(0 < e.excess <= 1 for e in update.values())
    assert drive.known_mistakes == {}


@pytest.mark.slow
def test_an_update_at_another_rate_is_known_and_one_of_another_kind_is_not():
    wrong, other = found(TooFast), found(DecaysMore)
    assert all(e.excess > 1 for e in wrong.updates[0].values())
    assert wrong.known_mistakes[ANOTHER_RATE].excess <= 1
    assert other.known_mistakes[ANOTHER_RATE].excess > 1


@pytest.mark.slow
def test_nothing_is_kept_without_a_schedule():
    assert found(BACKENDS["amp"], replace(TASK, schedule=Constant())) is None
