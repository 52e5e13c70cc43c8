import itertools
import subprocess
import sys
import threading
import time

import pytest
import torch
from conftest import make_task

from mpcompare.contract import Stepper
from mpcompare.entrant.phases import PhaseTimes, time_phases
from mpcompare.entrant.timing import try_block
from mpcompare.instruments import clock as measure
from mpcompare.instruments.bystanders import Bystanders, Rest
from mpcompare.phases import WHOLE_STEP

CPU = torch.device("cpu")
TASK = make_task()


def test_clock_times_what_lies_between_two_marks(device):
    clock = measure.clock(device)

    def work(seconds):
        if device.type == "cuda":
            torch.cuda._sleep(int(seconds * 1e9))
        else:
            time.sleep(seconds)

    clock.mark()
    for seconds in (0.02, 0.04):
        work(seconds)
        clock.mark()
    first, second = clock.read()
    assert 5 < first < second
    if device.type == "cpu":
        assert first >= 20
    assert clock.read() == []


@pytest.mark.quiet
def test_settle_waits_for_threads_that_spin():
    assert measure.settle()
    done = threading.Event()

    def spin():
        while not done.is_set():
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        start = time.monotonic()
        assert not measure.settle(limit_s=0.1)
        assert time.monotonic() - start >= 0.1
    finally:
        done.set()
        thread.join()


class SaidClock(measure.CpuClock):
    """Time passes where a step says so, in ms; and each mark costs some."""

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
    assert trial.losses == list(range(1, untimed + 50 + 2))  # of all its steps, and of one after it
    assert try_block(stepper(Phases(clock)), BATCHES, 1e-6, clock).steps == 1


def test_the_clock_of_a_cpu_is_the_walls():
    """What the others show with a clock of their own."""
    clock = measure.CpuClock()

    class Sleeper(Phases):
        def forward(self, *_):
            time.sleep(0.003)
            return 0.0

    clock.now = 0.0
    found = time_phases(stepper(Sleeper(clock)), BATCHES, 2, clock, TASK)
    assert found.phase_ms["forward"] >= 3 > found.phase_ms["step"]


def test_the_load_of_the_machine_is_seen():
    bystanders = Bystanders(CPU)
    bystanders.start()
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    time.sleep(1)
    load = bystanders.stop()
    other.kill()
    assert set(load) == {"clock_mhz", "other_cores", "throttle"}
    if load["other_cores"] is not None:
        assert load["other_cores"] > 0.3
    assert load["throttle"] is None


def test_what_a_process_computes_between_its_turns_is_seen():
    rest = Rest()
    time.sleep(0.2)
    assert rest.stop() < 0.02
    rest.start()
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert rest.stop() > 0.1  # less than 1 where others compute too


def test_percentiles_keep_every_step():
    values = [1.0] * 7 + [2.0] * 3 + [1000.0]
    assert measure.percentiles(values) == {"step_ms_p20": 1.0, "step_ms_p50": 1.0, "step_ms_p80": 2.0}
