"""The time of a block of bare steps, and the number of steps that it has."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from mpcompare.contract import Stepper, warmup_steps
from mpcompare.entrant.sample import Lines
from mpcompare.entrant.setup import Setup, Stream
from mpcompare.entrant.state import Trained, Trial
from mpcompare.instruments.clock import Clock


def try_block(stepper: Stepper, stream: Stream, block_s: float, clock: Clock) -> Trial:
    """Finds the number of steps that take about ``block_s`` seconds, at least one."""
    for batch in islice(stream, untimed_steps(1, stepper.backend)):
        stepper.step(batch)
    steps = 1
    while (block_ms := time_block(stepper, stream, steps, clock).step_ms * steps) <= block_s * 1e3 / 8:
        steps *= 2
    steps = max(1, round(steps * block_s * 1e3 / block_ms))
    return Trial(steps, untimed_steps(steps, stepper.backend))


@dataclass(frozen=True)
class TimedBlock:
    """A block that was timed."""

    step_ms: float  # milliseconds a step by the clock, until loss and weights have been read
    wall_ms: float  # the same by the wall clock
    read_ms: float  # milliseconds by the wall clock from the return of the last step until both have been read
    loss: float  # the loss of the last step; NaN where there is none
    # lines, read: the lines of the weights, and the numbers that were read from them
    lines: Lines
    read: Tensor

    def still(self, weights: Mapping[str, Tensor]) -> bool:
        """Returns whether ``weights`` are still as they were read when the clock stopped."""
        return torch.equal(self.lines.of(weights).nan_to_num(), self.read.nan_to_num())


def fresh(setup: Setup, trained: Trained) -> Stepper:
    """Returns a new backend in the state in which training ended.

    Each block has a new backend. The place of a program's memory makes it up to 5 % faster or slower for as long as it
    runs, so blocks of one layout agree with each other and not with the next run's. Laid out anew, each block is an
    independent draw, and the interval holds this effect, too (Curtsinger and Berger, "Stabilizer", ASPLOS 2013).
    """
    return setup.stepper_at(trained.state(), trained.updates)


def untimed_steps(steps: int, backend: Any) -> int:
    """Returns how many steps a fresh backend takes before a block of ``steps``. After another entrant's turn caches are
    cold, and fresh pages are not mapped yet. The backend's warm-up, such as the capture of a graph, must be over."""
    return max(warmup_steps(backend) + 1, steps // 4)


def time_block(stepper: Stepper, stream: Stream, steps: int, clock: Clock, lines: Lines | None = None) -> TimedBlock:
    """Takes ``steps`` bare steps: nothing is read or written between them. The block ends when the loss of the last
    step and a line of every weight (``lines``, or new ones) have been read."""
    backend = stepper.backend
    lines = lines or Lines(backend.master_params())
    loss: Any = float("nan")
    start = time.perf_counter()
    clock.mark()
    for batch in islice(stream, steps):
        loss = stepper.step(batch)
    returned = time.perf_counter()
    loss = float(loss)
    clock.wait()
    read = lines.of(backend.master_params())
    clock.mark()
    (block_ms,) = clock.read()
    end, steps = time.perf_counter(), max(steps, 1)
    return TimedBlock(block_ms / steps, (end - start) * 1e3 / steps, (end - returned) * 1e3, loss, lines, read)
