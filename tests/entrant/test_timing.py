"""Blocks of bare steps, and the phases of a step, by a clock that is told how much time passes."""

import itertools
import time

import pytest
from support.tasks import make_task

from mpcompare.contract import Stepper
from mpcompare.entrant.phases import PhaseTimes, time_phases
from mpcompare.entrant.timing import try_block
from mpcompare.instruments.clock import CpuClock
from mpcompare.phases import WHOLE_STEP

TASK = make_task()


class SaidClock(CpuClock):
    """A clock whose time passes where a step says so, in ms; each mark costs some."""

    def __init__(self, cost=0.0):
        self.now, self.cost, self.marks = 0.0, cost, []

    def mark(self):
        self.now += self.cost
        self.marks.append(self.now)

    def read(self):
        marks, self.marks = self.marks, []
        return [after - before for before, after in itertools.pairwise(marks)]


class Phases:
    """A backend that takes 3 ms in forward and 6 in backward; its loss is the number of the step."""

    IDLE_PHASES = ("unscale",)
    skipped, grad_norm = False, None

    def __init__(self, clock):
        self.clock, self.taken = clock, 0

    def forward(self, *_):
        self.taken += 1
        self.clock.now += 3
        return float(self.taken)

    def backward(self):
        self.clock.now += 6

    def unscale(self):
        pass

    clip = update = unscale

    def step(self, lr):
        pass


BATCHES = itertools.repeat([(None, None)])


def stepper(backend):
    return Stepper(backend, TASK.new_rates())


def test_phases_of_a_step_are_timed_apart_and_their_clock_is_paid_for():
    clock = SaidClock()
    found = time_phases(stepper(Phases(clock)), BATCHES, 5, clock, TASK)
    assert found.phase_ms == {"forward": 3, "backward": 6, "unscale": None, "clip": None, "step": 0, "update": 0}
    assert found.phase_overhead == 0
    clock = SaidClock(cost=0.1)  # seven marks a step, and the first of a block is no interval's
    found = time_phases(stepper(Phases(clock)), BATCHES, 5, clock, TASK)
    assert found.phase_ms["forward"] == pytest.approx(3.1)
    assert found.phase_overhead == pytest.approx((9 + 0.1 * 34 / 5) / (9 + 0.1 / 5) - 1)


def test_a_step_that_is_one_piece_has_one_time():
    class Whole:
        skipped = False

        def train_step(self, *_):
            clock.now += 4
            return 0.0

    clock = SaidClock()
    assert time_phases(stepper(Whole()), BATCHES, 5, clock, TASK) == PhaseTimes({WHOLE_STEP: 4}, 0)


def test_a_block_takes_as_long_as_it_should_and_its_losses_are_kept():
    clock = SaidClock()
    trial = try_block(stepper(Phases(clock)), BATCHES, 0.45, clock)
    assert trial.steps == 450 / 9
    untimed = 50 // 4
    assert trial.untimed == untimed
    assert trial.losses == list(range(1, untimed + 50 + 2))  # the losses of all its steps, and of one after it
    short = try_block(stepper(Phases(clock)), BATCHES, 1e-6, clock)
    assert (short.steps, short.untimed) == (1, 1)


def test_a_block_begins_when_the_backend_is_warm():
    clock = SaidClock()
    backend = Phases(clock)
    backend.warmup_steps = 2  # as those before the capture of a graph, which is the third step
    trial = try_block(stepper(backend), BATCHES, 1e-6, clock)
    assert (trial.steps, trial.untimed) == (1, 3)
    assert trial.losses == [1, 2, 3, 4, 5]


def test_the_clock_of_a_cpu_is_the_walls():
    """The real clock measures the time that other tests tell to a clock."""
    clock = CpuClock()

    class Sleeper(Phases):
        def forward(self, *_):
            time.sleep(0.003)
            return 0.0

    clock.now = 0.0
    found = time_phases(stepper(Sleeper(clock)), BATCHES, 2, clock, TASK)
    assert found.phase_ms["forward"] >= 3 > found.phase_ms["step"]
