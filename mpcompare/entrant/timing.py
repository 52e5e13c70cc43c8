"""How long is a step? Blocks of bare steps, in turns with the others; and where in it does the time go?"""

import random
import time
from collections.abc import Generator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpcompare.contract import PHASES, State, Stepper, idle_phases, in_one_piece
from mpcompare.entrant.setup import Setup, Stream
from mpcompare.entrant.training import keep
from mpcompare.instruments import meter
from mpcompare.instruments.bystanders import Bystanders, Rest
from mpcompare.instruments.clock import Clock, CudaClock, settle
from mpcompare.native.graph import WARMUP
from mpcompare.phases import WHOLE_STEP
from mpcompare.race.turns import Finish, Order, Progress, Time, Turn
from mpcompare.records import Recorder
from mpcompare.tasks.task import Task


@dataclass(frozen=True)
class Trained:
    """What training left: the backend's state, and how many updates led to it."""

    state: State
    updates: int


@dataclass(frozen=True)
class Trial:
    """What the trained backend does in the steps that will be timed: it goes on as it is, and is never loaded.

    Attributes:
        steps: of a timed block.
        losses: of the untimed steps before a block, of its own, and of one more after it.
    """

    steps: int
    losses: list[float]


def try_block(stepper: Stepper, stream: Stream, block_s: float, clock: Clock) -> Trial:
    """How many steps take about ``block_s``, at least one; and the losses of a block."""
    losses: list[Any] = []
    steps = 1
    while True:
        clock.mark()
        losses += [keep(stepper.step(batch)) for batch in islice(stream, steps)]
        clock.mark()
        (block_ms,) = clock.read()
        if block_ms > block_s * 1e3 / 8:
            break
        steps *= 2
    steps = max(1, round(steps * block_s * 1e3 / block_ms))
    total = untimed_steps(steps, clock) + steps + 1
    losses += [keep(stepper.step(batch)) for batch in islice(stream, max(total - len(losses), 0))]
    return Trial(steps, [float(loss) for loss in losses[:total]])


def take_turns(
    setup: Setup, trained: Trained, trial: Trial, recorder: Recorder, text: str
) -> Generator[Progress | Turn, Order | None, tuple[Finish, list[float], float]]:
    """Blocks of steps, one a turn.

    Returns:
        Why that ended; the blocks' milliseconds a step; the largest difference between a loss in a block and the
        trial's at the same step. Three are read: of the first untimed step, of the last timed one, and of one more
        after it, which depends on every update before it. What is timed is what was examined.
    """
    blocks, difference, bystanders, rest = [], 0.0, Bystanders(setup.device), Rest()
    order = yield Turn(text=text)
    untimed = untimed_steps(trial.steps, setup.clock)
    while isinstance(order, Time):
        between = rest.stop()
        padding, stepper, stream = _padding(setup.device), fresh(setup, trained), setup.batches()
        losses: dict[int, Any] = {0: keep(stepper.step(next(stream)))}
        time_block(stepper, stream, untimed - 1, setup.clock)
        bystanders.start()
        step_ms, wall_ms, losses[untimed + trial.steps - 1] = time_block(stepper, stream, trial.steps, setup.clock)
        load = bystanders.stop()
        losses[untimed + trial.steps] = keep(stepper.step(next(stream)))
        for step, loss in losses.items():
            difference = max(difference, abs(float(loss) - trial.losses[step]))
        del padding, stepper
        meter.release()
        settled = settle()
        blocks.append(step_ms)
        row = {"round": order.round, "steps": trial.steps, "step_ms": step_ms, "wall_ms": wall_ms, **load}
        recorder.block({**row, "settled": settled, "cores_between_turns": between})
        rest.start()
        order = yield Turn(step_ms)
    assert isinstance(order, Finish)
    return order, blocks, difference


def fresh(setup: Setup, trained: Trained) -> Stepper:
    """A new backend in the state that training ended in.

    Each block has one: where a program's memory happens to lie makes it up to 5 % faster or slower for as long as it
    runs, so that blocks of one layout agree with each other and not with the next run's. Laid out anew, each block is
    an independent draw, and the interval holds that too (Curtsinger and Berger, "Stabilizer", ASPLOS 2013).
    """
    return setup.stepper_at(trained.state, trained.updates)


def untimed_steps(steps: int, clock: Clock) -> int:
    """Steps before a block of ``steps``: after another's turn caches are cold, and fresh pages are not mapped yet; on
    CUDA a fresh backend also captures its graphs, in its third step at the latest."""
    return max(WARMUP + 1 if isinstance(clock, CudaClock) else 1, steps // 4)


def _padding(device: torch.device) -> Tensor:
    """Up to 4 MB that shift what is allocated after it."""
    return torch.empty(random.randrange(1 << 12, 1 << 22), dtype=torch.uint8, device=device)


def time_block(stepper: Stepper, stream: Stream, steps: int, clock: Clock) -> tuple[float, float, Any]:
    """Milliseconds a step of ``steps`` bare steps, by the clock and by the wall: nothing is read or written between.
    And the loss of the last one (NaN of none)."""
    loss: float | Tensor = float("nan")
    start = time.perf_counter()
    clock.mark()
    for batch in islice(stream, steps):
        loss = stepper.step(batch)
    clock.mark()
    (block_ms,) = clock.read()
    steps = max(steps, 1)
    return block_ms / steps, (time.perf_counter() - start) * 1e3 / steps, keep(loss)


PHASE_BLOCKS = 4  # of each kind


def time_phases(stepper: Stepper, stream: Stream, steps: int, clock: Clock, task: Task) -> dict[str, Any]:
    """Where a step's time goes.

    Returns:
        ``phase_ms``, the median of each phase over all steps, None where it holds no work; ``phase_overhead``, what the
        clock between the phases costs relative to bare steps, in blocks that take turns.
    """
    time_block(stepper, stream, untimed_steps(steps, clock), clock)
    backend = stepper.backend
    if in_one_piece(backend):
        bare = [time_block(stepper, stream, steps, clock)[0] for _ in range(PHASE_BLOCKS)]
        return {"phase_ms": {WHOLE_STEP: float(np.median(bare))}, "phase_overhead": 0.0}
    phases, bare, clocked = [], [], []
    for number in range(2 * PHASE_BLOCKS):
        if number % 4 in (0, 3):  # bare, clocked, clocked, bare: drift hits both alike
            bare.append(time_block(stepper, stream, steps, clock)[0])
            continue
        for batch in islice(stream, steps):
            clock.mark()
            for _ in stepper.walk(batch):
                clock.mark()
        intervals = clock.read()
        clocked.append(sum(intervals) / steps)
        # The last of each row lies between two steps; forward and backward come once a micro-batch.
        rows = np.array([*intervals, 0.0]).reshape(steps, -1)[:, :-1]
        passes = rows[:, : 2 * task.accumulate].reshape(steps, task.accumulate, 2).sum(axis=1)
        phases.append(np.hstack([passes, rows[:, 2 * task.accumulate :]]))
    idle = idle_phases(backend, task)
    medians = np.median(np.concatenate(phases), axis=0)
    named = zip(PHASES, medians.tolist(), strict=True)
    return {
        "phase_ms": {phase: None if phase in idle else ms for phase, ms in named},
        "phase_overhead": float(np.median(clocked) / np.median(bare) - 1),
    }
