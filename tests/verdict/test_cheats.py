"""Backends that compute something else once they were loaded. Timed backends must compute as the examined ones did."""

import itertools
import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from support.entrants import Local, Unseen
from support.judging import dataset_of, examined
from support.plans import SMALL_PLAN, replan
from support.tasks import make_task

from mpcompare.backends.amp import Amp
from mpcompare.entrant.entrant import compete
from mpcompare.entrant.state import Trial
from mpcompare.race.turns import Rules, race
from mpcompare.records import RunRecorder
from mpcompare.report.runs import read_run
from mpcompare.report.verdicts import judge_run
from mpcompare.tasks.data import drawn_batches
from mpcompare.tasks.optimizers import AdamW, Sgd

TASK = make_task(in_features=30, hidden=[24], batch_size=64, samples=640)


class HalfOfTheRows(Amp):
    """``amp`` that takes half of each batch once it was loaded, and needs half of the time."""

    loaded = False

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.loaded = True

    def forward(self, x, y):
        half = len(x) // 2 if self.loaded else len(x)
        return super().forward(x[:half], y[:half])


class ScalerForgotten(Amp):
    """A loaded backend begins with the first loss scale again."""

    def load_state_dict(self, state):
        super().load_state_dict({**state, "loss_scale": {}})


class MomentumForgotten(Amp):
    """A loaded backend begins with no momentum."""

    def load_state_dict(self, state):
        super().load_state_dict({**state, "optimizer": {}})


def failed_kinds(verdict):
    return {check.kind for check in verdict.checks if not check.passed}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "precision"),
    [(HalfOfTheRows, "fp16"), (HalfOfTheRows, "bf16"), (ScalerForgotten, "fp16"), (MomentumForgotten, "bf16")],
)
def test_what_was_loaded_goes_on_as_what_was_not(backend, precision):
    task = make_task(in_features=30, hidden=[24], batch_size=64, samples=640, momentum=0.9)
    dataset = dataset_of(task)
    amp = examined("amp", Amp, task, dataset, precision, steps=6, noise=2)
    assert "resume" not in failed_kinds(judge_run(amp, amp))
    verdict = judge_run(examined("cheat", backend, task, dataset, precision, steps=6), amp)
    assert (verdict.word, verdict.cause) == ("differs", "resume")


TEN_ROUNDS = Rules(rel_ci=0.999, budget_s=600, block_s=0.01)  # the first look finds any interval narrow enough


@pytest.fixture
def timed(tmp_path, monkeypatch):
    """Returns a function that takes every turn of a race of one entrant. Its blocks have 12 steps, and the first 3 of
    them are not timed. The function returns the run as its record is read back."""
    monkeypatch.setattr("mpcompare.entrant.entrant.try_block", lambda *_: Trial(steps=9, untimed=3))
    return partial(run_of, tmp_path / "run")


def run_of(folder, backend, task=TASK):
    plan = replan(
        SMALL_PLAN, backend="amp", make_backend=backend, is_baseline=True, task=task, precision="bf16",
        load_data=lambda seed: dataset_of(task, seed), verdict={"enabled": True},
    )  # fmt: skip
    config = {"task": {}, "train": {"steps": 4, "warmup_steps": 1}}
    at_start = {"backend": "amp", "task": "small", "batch_size": 64, "seed": 0, "config": config}
    folder.mkdir()
    race([Local(compete(plan, RunRecorder(folder, at_start)))], TEN_ROUNDS, Unseen())
    return read_run(folder)


def judged(run):
    """Returns the verdict on a run compared with itself, and the names of its failed checks of timed steps."""
    verdict = judge_run(run, run)
    checks = [check for check in verdict.checks if check.kind == "timed steps"]
    assert checks
    return verdict, {check.name for check in checks if not check.passed}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "kinds"),
    [
        pytest.param(Sgd(lr=0.1), set(), marks=pytest.mark.slow),
        pytest.param(Sgd(lr=0.1, momentum=0.9), {"momentum_buffer"}, marks=pytest.mark.slow),
        (AdamW(lr=0.01), {"exp_avg", "exp_avg_sq", "step"}),
    ],
)
def test_timed_blocks_of_a_right_backend_end_as_the_examined_one_does_bit_for_bit(timed, optimizer, kinds):
    run = timed(Amp, replace(TASK, optimizer=optimizer))
    verdict, failed = judged(run)
    assert (verdict.word, failed) == ("reference", set())
    compared = run.result.compared
    assert set(compared.timed_state) == {"weights", *kinds}
    assert compared.timed_loss_difference == 0
    assert all(each.difference == 0 < each.moved for each in compared.timed_state.values())


@pytest.mark.slow
def test_the_loss_of_timed_steps_is_that_of_the_examined_backend(timed):
    _, failed = judged(timed(HalfOfTheRows))
    assert {"loss of timed steps", "weights after timed steps"} <= failed


class SinceItWasLoaded(Amp):
    """``amp`` that counts its steps since it was loaded. The examination takes two steps of a loaded backend at most,
    so later steps are timed."""

    steps = None

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.steps = 0

    @property
    def is_timed(self):
        return self.steps is not None and self.steps > 3

    def forward(self, x, y):
        if self.steps is not None:
            self.steps += 1
        return super().forward(x, y)


class NoUpdates(SinceItWasLoaded):
    """Updates nothing in timed steps. At a small learning rate all of its losses are right."""

    def step(self, lr):
        if not self.is_timed:
            super().step(lr)


@pytest.mark.slow
def test_updates_that_are_left_out_are_found_where_losses_tell_nothing(timed):
    verdict, failed = judged(timed(NoUpdates, replace(TASK, optimizer=Sgd(lr=1e-5))))
    assert (verdict.word, verdict.cause) == ("differs", "timed steps")
    assert failed == {"weights after timed steps"}


class Replays(SinceItWasLoaded):
    """Takes each timed step once. From then on it returns the loss of this step, and computes nothing."""

    seen = None  # a dict of the class, by what the cheat recognizes a step
    replayed = False

    def recognized(self, x):
        return self.steps

    def forward(self, x, y):
        loss = self.seen.get(self.recognized(x)) if self.is_timed else None
        self.replayed = loss is not None
        if self.replayed:
            self.steps += 1
            return loss
        loss = super().forward(x, y)
        if self.is_timed:
            self.seen[self.recognized(x)] = loss.clone()
        return loss

    def backward(self):
        if not self.replayed:
            super().backward()

    def unscale(self):
        if not self.replayed:
            super().unscale()

    def step(self, lr):
        if not self.replayed:
            super().step(lr)

    def update(self):
        if not self.replayed:
            super().update()


class ReplaysByBatch(Replays):
    """Recognizes its batches, and so has the loss of each batch, up to the few updates in between."""

    def recognized(self, x):
        return x.data_ptr()


@pytest.mark.slow
@pytest.mark.parametrize("backend", [Replays, pytest.param(ReplaysByBatch, marks=pytest.mark.slow)])
def test_losses_that_are_replayed_are_found(timed, backend):
    backend.seen = {}
    verdict, failed = judged(timed(backend))
    assert (verdict.word, verdict.cause) == ("differs", "timed steps")
    assert "weights after timed steps" in failed


class HonestAtTimes(Replays):
    """Computes timed steps only in blocks with some numbers: it knows how many rounds there are."""

    honest = ()
    numbers = None
    number = None

    def forward(self, x, y):
        if self.steps == 4:
            self.number = next(self.numbers)
        self.replayed = self.is_timed and self.number not in self.honest
        if self.replayed:
            self.steps += 1
            return self.left
        if self.number in self.honest:
            time.sleep(0.02)  # a step of a real network, which no other program's load can hide
        self.left = SinceItWasLoaded.forward(self, x, y)
        return self.left


@pytest.mark.slow
@pytest.mark.parametrize("honest", [(1, 10), pytest.param((1, 3, 5, 10), marks=pytest.mark.slow)])
def test_a_block_of_those_that_make_the_median_is_compared(timed, honest):
    HonestAtTimes.honest, HonestAtTimes.numbers = honest, itertools.count(1)
    run = timed(HonestAtTimes)
    step_ms = run.blocks.set_index("round")["step_ms"]
    assert step_ms.drop(list(honest)).median() < min(step_ms[list(honest)])
    assert run.result.blocks.timing.compared not in honest
    verdict, failed = judged(run)
    assert (verdict.word, verdict.cause) == ("differs", "timed steps")
    assert "weights after timed steps" in failed


class WorksAhead(Replays):
    """Takes the timed steps before the clock starts, on the batches that the seed of torch's generators foretells."""

    ahead = None

    def forward(self, x, y):
        self.replayed = bool(self.ahead)
        return self.ahead.pop(0) if self.ahead else SinceItWasLoaded.forward(self, x, y)

    def update(self):
        super().update()
        if self.steps == 3 and self.ahead is None:  # the last step that is not timed
            foretold = drawn_batches(dataset_of(self.task), self.task.batch_size, torch.initial_seed())
            self.ahead = [self.taken(x, y) for x, y in itertools.islice(foretold, 9)]

    def taken(self, x, y):
        loss = Amp.forward(self, x, y)
        for phase in (Amp.backward, Amp.unscale, Amp.clip):
            phase(self)
        Amp.step(self, self.task.optimizer.lr)
        Amp.update(self)
        return loss.clone()


@pytest.mark.slow
def test_no_seed_that_a_backend_can_see_foretells_its_timed_batches(timed):
    verdict, failed = judged(timed(WorksAhead))
    assert (verdict.word, verdict.cause) == ("differs", "timed steps")
    assert {"loss of timed steps", "weights after timed steps"} <= failed


class ComputesWhenAsked(SinceItWasLoaded):
    """Leaves out the updates of timed steps: losses do not show them at a small learning rate. It makes up for them
    when it is asked for its weights for the third time."""

    asked, later = 0, ()

    def step(self, lr):
        if not self.is_timed:
            super().step(lr)
            return
        self.asked = 0
        self.later = [*self.later, ({name: p.grad.clone() for name, p in self.model.named_parameters()}, lr)]

    def master_params(self):
        if not self.is_timed:
            return super().master_params()
        self.asked += 1
        if self.asked == 3:
            self.make_up()
        return {name: p.clone() for name, p in super().master_params().items()}

    def make_up(self):
        for grads, lr in self.later:
            for name, p in self.model.named_parameters():
                p.grad = grads[name]
            Amp.step(self, lr)
        self.later = ()


@pytest.mark.slow
def test_weights_that_are_computed_after_the_clock_has_stopped_are_none(timed):
    verdict, failed = judged(timed(ComputesWhenAsked, replace(TASK, optimizer=Sgd(lr=1e-5))))
    assert (verdict.word, verdict.cause) == ("differs", "timed steps")
    assert failed == {"weights after timed steps"}


class Late:
    """A loss that waits for its step where it is read."""

    def __init__(self, step):
        self.step = step

    def __float__(self):
        return float(self.step.result())


STEP_S = 0.004  # at least


class InBackground(Amp):
    """``amp`` whose steps are taken by a thread, one after the other. A caller that asks for a result waits for the
    thread, as for an array of jax."""

    skipped = False

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.thread, self.last = ThreadPoolExecutor(1), None

    def whole(self, batches, lr):
        time.sleep(STEP_S)
        ((x, y),) = batches
        loss = self.forward(x, y)
        self.backward()
        super().step(lr)
        self.shown = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        self.optimizer.zero_grad()
        return loss

    def train_step(self, batches, lr):
        self.last = self.thread.submit(self.whole, batches, lr)
        return Late(self.last)

    def wait(self):
        if self.last is not None:
            self.last.result()

    def grads(self):
        self.wait()
        return self.shown

    def master_params(self):
        self.wait()
        return super().master_params()

    def state_dict(self):
        self.wait()
        return super().state_dict()

    def module_dtypes(self, x, y):
        return {}

    def dtypes(self):
        self.wait()
        return super().dtypes()


@pytest.mark.slow
def test_a_thread_that_still_computes_when_its_step_returns_gains_nothing(timed):
    run = timed(InBackground)
    assert judged(run)[1] == set()
    blocks = run.blocks
    assert (blocks["step_ms"] >= STEP_S * 1e3).all()  # the step itself returns in a hundredth of this time
    assert (blocks["read_ms"] > STEP_S * 1e3).all()


class SlowClock(Amp):
    """Lets the clock of its process go at a twentieth of its rate."""

    true = staticmethod(time.perf_counter_ns)

    def __init__(self, *arguments):
        super().__init__(*arguments)
        time.perf_counter_ns = lambda: SlowClock.true() // 20

    def forward(self, x, y):
        time.sleep(0.02)
        return super().forward(x, y)


@pytest.mark.slow
def test_a_clock_that_goes_slow_is_named(timed, monkeypatch):
    monkeypatch.setattr(time, "perf_counter_ns", time.perf_counter_ns)  # this clock is put back after the test
    verdict, failed = judged(timed(SlowClock))
    assert (verdict.word, verdict.cause, failed) == ("differs", "clock", {"clock of timed blocks"})
    assert verdict.because == "the clock of its process says 0.05 of the time that the race saw its blocks take"


@pytest.mark.slow
@pytest.mark.parametrize("backend", [Amp, InBackground])
def test_other_load_on_the_machine_accuses_nobody(timed, backend):
    others = [multiprocessing.get_context("spawn").Process(target=burn, daemon=True) for _ in range(6)]
    for other in others:
        other.start()
    try:
        verdict, failed = judged(timed(backend))
    finally:
        for other in others:
            other.kill()
    assert (verdict.word, failed) == ("reference", set())


def burn():
    while True:
        pass


class NotWaitedFor(SinceItWasLoaded):
    """Leaves the update of a timed step to a thread, and waits for it in the next step alone."""

    thread = None

    def meanwhile(self):
        end = time.thread_time() + 0.015
        while time.thread_time() < end:
            pass

    def forward(self, x, y):
        if self.thread:
            self.thread.join()
        return super().forward(x, y)

    def step(self, lr):
        self.lr = lr
        if not self.is_timed:
            super().step(lr)

    def update(self):
        if not self.is_timed:
            super().update()
            return
        self.thread = threading.Thread(target=self.later)
        self.thread.start()

    def later(self):
        self.meanwhile()
        super().step(self.lr)
        super().update()


class AsleepMeanwhile(NotWaitedFor):
    """Waits for so long that the harness takes it for done."""

    def meanwhile(self):
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "cause"),
    [(NotWaitedFor, "unfinished steps"), pytest.param(AsleepMeanwhile, "timed steps", marks=pytest.mark.slow)],
)
def test_weights_that_change_after_the_clock_has_stopped_are_found(timed, backend, cause):
    verdict, failed = judged(timed(backend))
    assert (verdict.word, verdict.cause) == ("differs", cause), verdict.because
    found = "weights after the clock stopped" if cause == "unfinished steps" else "weights after timed steps"
    assert found in failed
