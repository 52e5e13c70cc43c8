"""Blocks of bare steps, and the phases of a step, by a clock that is told how much time passes."""

import itertools
import math
import time
from types import SimpleNamespace

import pytest
import torch
from support.tasks import make_task

from mpcompare.contract import Stepper
from mpcompare.entrant.blocks import _block, _losses_apart
from mpcompare.entrant.phases import time_phases
from mpcompare.entrant.sample import Lines
from mpcompare.entrant.state import Trial
from mpcompare.entrant.timing import time_block, try_block
from mpcompare.fields import PhasesRecord
from mpcompare.instruments.clock import CpuClock
from mpcompare.phases import WHOLE_STEP
from mpcompare.race.orders import Conclude, Prepare, Time

TASK = make_task()


class SaidClock(CpuClock):
    """A clock whose time passes where a step says so, in ms. Each mark costs some time."""

    def __init__(self, cost=0.0):
        self.now, self.cost, self.marks = 0.0, cost, []

    def mark(self):
        self.now += self.cost
        self.marks.append(self.now)

    def read(self):
        marks, self.marks = self.marks, []
        return [after - before for before, after in itertools.pairwise(marks)]

    def wait(self):
        pass


class Phases:
    """A backend that takes 3 ms in forward and 6 in backward. Its loss is the number of the step."""

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

    def master_params(self):
        return {}


BATCHES = itertools.repeat([(None, None)])


def stepper(backend):
    return Stepper(backend, TASK.new_rates())


def test_phases_of_a_step_are_timed_apart_and_their_clock_is_paid_for():
    clock = SaidClock()
    found = time_phases(stepper(Phases(clock)), BATCHES, 5, clock, TASK)
    assert found.phase_ms == {"forward": 3, "backward": 6, "unscale": None, "clip": None, "step": 0, "update": 0}
    assert found.phase_overhead == 0
    clock = SaidClock(cost=0.1)  # seven marks a step; the first mark of a block ends no interval
    found = time_phases(stepper(Phases(clock)), BATCHES, 5, clock, TASK)
    assert found.phase_ms["forward"] == pytest.approx(3.1)
    assert found.phase_overhead == pytest.approx((9 + 0.1 * 34 / 5) / (9 + 0.1 / 5) - 1)
    assert found.phase_sum_ms == pytest.approx(9 + 0.1 * 34 / 5)


def test_a_step_that_is_one_piece_has_one_time():
    class Whole:
        skipped = False
        master_params = Phases.master_params

        def train_step(self, *_):
            clock.now += 4
            return 0.0

    clock = SaidClock()
    assert time_phases(stepper(Whole()), BATCHES, 5, clock, TASK) == PhasesRecord(
        phase_ms={WHOLE_STEP: 4}, phase_overhead=0, phase_sum_ms=4
    )


def test_a_block_takes_as_long_as_it_should():
    clock = SaidClock()
    assert try_block(stepper(Phases(clock)), BATCHES, 0.45, clock) == Trial(steps=450 // 9, untimed=50 // 4)
    assert try_block(stepper(Phases(clock)), BATCHES, 1e-6, clock) == Trial(steps=1, untimed=1)


def test_a_block_begins_when_the_backend_is_warm():
    clock = SaidClock()
    backend = Phases(clock)
    backend.warmup_steps = 2  # such as the steps before the capture of a graph, in the third step
    assert try_block(stepper(backend), BATCHES, 1e-6, clock) == Trial(steps=1, untimed=3)
    assert backend.taken == 4


class Late(Phases):
    """A backend whose step returns at once. A caller that reads its loss or its weights waits for all queued work."""

    skipped = False
    queued = 0
    weight = torch.zeros(2, 3)

    def train_step(self, *_):
        self.queued += 1
        return self

    def __float__(self):
        self.clock.now += 4
        return 0.5

    def master_params(self):
        self.clock.now += 5 * self.queued
        self.queued = 0
        return {"weight": self.weight.add_(1.0)}


def test_a_block_ends_when_its_loss_and_its_weights_have_been_read():
    clock = SaidClock()
    backend = Late(clock)
    timed = time_block(stepper(backend), BATCHES, 10, clock)
    assert timed.step_ms == (4 + 5 * 10) / 10
    assert timed.loss == 0.5
    assert timed.read.tolist() == [2.0] * 3  # the line of the weight, with its values at the end
    assert not timed.still(backend.master_params())


class Draws(Phases):
    """A backend whose constructor and whose steps draw from torch's generator. Its loss is the number drawn."""

    def __init__(self, clock):
        super().__init__(clock)
        torch.rand(100)

    def forward(self, *_):
        return torch.rand(())

    buffers = Phases.master_params

    def state_dict(self):
        return {"optimizer": {}}


def test_a_block_begins_with_the_same_random_numbers_whatever_its_backend_drew_when_it_was_made():
    clock = SaidClock()
    setup = SimpleNamespace(
        device=torch.device("cpu"), clock=clock, model=torch.nn.Linear(2, 2), drawn_batches=lambda _: BATCHES,
        stepper_at=lambda *_: stepper(Draws(clock)),
    )  # fmt: skip
    trained = SimpleNamespace(state=dict, updates=0)
    turns = _block(setup, trained, Trial(steps=2, untimed=1), Prepare(11), kept=True)
    for order in (None, Time(1, 22), None):
        turns.send(order)
    with pytest.raises(StopIteration) as over:
        turns.send(Conclude(0.1, 0.1))
    drawn = torch.rand(3, generator=torch.Generator().manual_seed(11)).tolist()
    assert over.value.value[1].losses == (drawn[0], drawn[2])


@pytest.mark.parametrize(
    ("mine", "its", "apart"),
    [
        (1.0, 0.25, 0.75),
        (math.inf, math.inf, 0.0),
        (math.nan, math.nan, 0.0),
        (math.inf, -math.inf, math.inf),
        (0.5, math.inf, math.inf),
        (0.5, math.nan, math.nan),
    ],
)
def test_the_same_infinite_loss_in_both_blocks_is_no_difference(mine, its, apart):
    assert _losses_apart(mine, its) == pytest.approx(apart, abs=0, nan_ok=True)


def test_lines_are_drawn_from_every_weight_that_holds_a_number():
    shapes = {"bias": (4,), "kernel": (5, 3, 2), "scale": (), "empty": (0, 3), "half": (6, 2)}
    params = {name: torch.rand(shape, requires_grad=True) for name, shape in shapes.items()}
    weights = {**params, "half": params["half"].bfloat16()}
    places = [Lines(weights).places for _ in range(40)]
    assert {name: len(place) for name, place in places[0].items()} == {"bias": 0, "kernel": 2, "scale": 0, "half": 1}
    assert {each["kernel"][0] for each in places} == set(range(5))
    lines = Lines(weights)
    bias, kernel, scale, half = lines.of(weights).split([4, 2, 1, 2])
    assert torch.equal(bias, params["bias"])
    assert torch.equal(kernel, params["kernel"][lines.places["kernel"]])
    assert scale == params["scale"]
    assert torch.equal(half, params["half"][lines.places["half"]].bfloat16())


def test_the_clock_of_a_cpu_is_the_wall_clock():
    """The real clock measures the time that other tests tell to a clock."""
    clock = CpuClock()

    class Sleeper(Phases):
        def forward(self, *_):
            time.sleep(0.05)
            return 0.0

    clock.now = 0.0
    found = time_phases(stepper(Sleeper(clock)), BATCHES, 2, clock, TASK)
    assert found.phase_ms["forward"] >= 50 > found.phase_ms["step"]
