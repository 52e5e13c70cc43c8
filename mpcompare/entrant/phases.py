"""The pass on the time of each phase of a step: blocks with a clock between the phases, and blocks of bare steps."""

from itertools import islice

import numpy as np
from numpy.typing import NDArray

from mpcompare.contract import PHASES, Stepper, idle_phases, in_one_piece
from mpcompare.entrant.setup import Stream
from mpcompare.entrant.state import Entrant
from mpcompare.entrant.timing import fresh, time_block, untimed_steps
from mpcompare.fields import PhasesRecord
from mpcompare.instruments import heap
from mpcompare.instruments.clock import Clock
from mpcompare.phases import WHOLE_STEP
from mpcompare.tasks.task import Task

BLOCKS = 4  # the number of blocks of each kind


def take(entrant: Entrant) -> PhasesRecord:
    """Needs ``setup``, ``trained`` and ``trial``. Leaves nothing."""
    setup = entrant.setup
    heap.fill_holes()  # the trained backend has left holes
    stepper = fresh(setup, entrant.trained)
    return time_phases(stepper, setup.batches(), entrant.trial.steps, setup.clock, setup.task)


def time_phases(stepper: Stepper, stream: Stream, steps: int, clock: Clock, task: Task) -> PhasesRecord:
    """Times the phases in blocks of ``steps`` steps; a step in one piece has one time."""
    time_block(stepper, stream, untimed_steps(steps, stepper.backend), clock)
    if in_one_piece(stepper.backend):
        bare = [time_block(stepper, stream, steps, clock).step_ms for _ in range(BLOCKS)]
        whole = float(np.median(bare))
        return PhasesRecord(phase_ms={WHOLE_STEP: whole}, phase_overhead=0.0, phase_sum_ms=whole)
    phases, bare, clocked = [], [], []
    for number in range(2 * BLOCKS):
        if number % 4 in (0, 3):  # bare, clocked, clocked, bare: drift hits both alike
            bare.append(time_block(stepper, stream, steps, clock).step_ms)
            continue
        intervals = _clocked_block(stepper, stream, steps, clock)
        clocked.append(sum(intervals) / steps)
        phases.append(_by_phase(intervals, steps, task.accumulate))
    idle = idle_phases(stepper.backend, task)
    medians = zip(PHASES, np.median(np.concatenate(phases), axis=0).tolist(), strict=True)
    return PhasesRecord(
        phase_ms={phase: None if phase in idle else ms for phase, ms in medians},
        phase_overhead=float(np.median(clocked) / np.median(bare) - 1),
        phase_sum_ms=float(np.median(clocked)),
    )


def _clocked_block(stepper: Stepper, stream: Stream, steps: int, clock: Clock) -> list[float]:
    """Returns the milliseconds of each phase of each step, and in between the milliseconds from a step to the next."""
    for batch in islice(stream, steps):
        clock.mark()
        for _ in stepper.walk(batch):
            clock.mark()
    return clock.read()


def _by_phase(intervals: list[float], steps: int, accumulate: int) -> NDArray[np.float64]:
    """Returns the milliseconds of each of ``PHASES`` in each step, ``[steps, phases]``."""
    # The last interval of each row lies between two steps; forward and backward come once a micro-batch.
    rows = np.array([*intervals, 0.0]).reshape(steps, -1)[:, :-1]
    passes = rows[:, : 2 * accumulate].reshape(steps, accumulate, 2).sum(axis=1)
    return np.hstack([passes, rows[:, 2 * accumulate :]])
