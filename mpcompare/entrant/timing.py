"""The time of a step: blocks of bare steps, in turns with the other entrants."""

import random
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from mpcompare.contract import Stepper, warmup_steps
from mpcompare.entrant.sample import Ended, Lines, Sample
from mpcompare.entrant.setup import Setup, Stream
from mpcompare.entrant.state import Trained, Trial
from mpcompare.instruments import meter
from mpcompare.instruments.bystanders import Bystanders, Rest
from mpcompare.instruments.clock import Clock, settle
from mpcompare.race.orders import Conclude, Finish, Order, Prepare, Progress, Time, Turn
from mpcompare.records import RunRecorder


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
    """A block that was timed.

    Attributes:
        step_ms: milliseconds a step by the clock, to the moment in which loss and weights have been read.
        wall_ms: the same by the wall.
        read_ms: milliseconds by the wall from the return of the last step to that moment.
        loss: of the last step; NaN where there is none.
        lines, read: the lines of the weights, and what was read of them.
    """

    step_ms: float
    wall_ms: float
    read_ms: float
    loss: float
    lines: Lines
    read: Tensor

    def still(self, weights: Mapping[str, Tensor]) -> bool:
        """Whether ``weights`` are as they were read when the clock stopped."""
        return torch.equal(self.lines.of(weights).nan_to_num(), self.read.nan_to_num())


@dataclass(frozen=True)
class Blocks:
    """The timed blocks of one entrant.

    Attributes:
        finish: the order that ended them.
        step_ms: milliseconds a step of each block.
        unfinished: the number of blocks whose weights went on changing after the clock had stopped.
        ends: the end of each block, by its round, where the run was examined: any may be the one that is compared.
    """

    finish: Finish
    step_ms: list[float]
    unfinished: int
    ends: dict[int, Ended]


def take_turns(
    setup: Setup, trained: Trained, trial: Trial, recorder: RunRecorder, text: str, kept: bool
) -> Generator[Progress | Turn, Order | None, Blocks]:
    """Times a block of steps whenever the race orders it; ``text`` is said at the end of the turn before.

    Args:
        trained: the state in which every block begins.
        kept: whether the ends of blocks are to be returned.
    """
    step_ms, unfinished, ends, rest = [], 0, {}, Rest()
    order = yield Turn(text=text)
    while isinstance(order, Prepare):
        waited = rest.stop()
        row, end = yield from _block(setup, trained, trial, order, kept)
        meter.release()
        recorder.block({**row, **waited, "settled": settle()})
        step_ms.append(row["step_ms"])
        unfinished += not row["finished"]
        if end:
            ends[row["round"]] = end
        rest.start()
        order = yield Turn()
    assert isinstance(order, Finish)
    return Blocks(order, step_ms, unfinished, ends)


def _block(
    setup: Setup, trained: Trained, trial: Trial, order: Prepare, kept: bool
) -> Generator[Turn, Order | None, tuple[dict[str, Any], Ended | None]]:
    """Times one block. Returns its row of ``blocks.csv``, and its end, if that is to be ``kept``."""
    torch.manual_seed(order.seed)  # for a backend that draws numbers: the trained one will draw the same
    bystanders, shift = Bystanders(setup.device), random.randrange(1 << 12, 1 << 22)
    padding = torch.empty(shift, dtype=torch.uint8, device=setup.device)  # shifts all that is allocated after it
    stepper = fresh(setup, trained)
    untimed = setup.drawn_batches(order.seed)
    first = float(stepper.step(next(untimed)))
    time_block(stepper, untimed, trial.untimed - 1, setup.clock)
    lines = Lines(stepper.backend)
    bystanders.start()
    now = yield Turn()
    assert isinstance(now, Time)
    stream = setup.drawn_batches(now.seed)
    began = time.perf_counter()
    yield Turn(goes_on=True)
    timed = time_block(stepper, stream, trial.steps, setup.clock, lines)
    over = yield Turn(timed.step_ms)
    heard = time.perf_counter()
    assert isinstance(over, Conclude)
    load = bystanders.stop()
    settle()
    setup.clock.wait()
    weights = stepper.backend.master_params()
    row = {
        "round": now.round,
        "steps": trial.steps,
        "step_ms": timed.step_ms,
        "wall_ms": timed.wall_ms,
        "seen_s": over.seen_s,
        "longest_s": over.longest_s,
        "messages_s": heard - began - timed.wall_ms * max(trial.steps, 1) / 1e3,
        "read_ms": timed.read_ms,
        "finished": timed.still(weights),
        **load,
    }
    del padding
    if not kept:
        return row, None
    backend, sample = stepper.backend, Sample(setup.model)
    left = sample.of(weights, backend.buffers(), backend.state_dict()["optimizer"])
    return row, Ended((order.seed, now.seed), (first, timed.loss), sample, left)


def fresh(setup: Setup, trained: Trained) -> Stepper:
    """Returns a new backend in the state in which training ended.

    Each block has one: where a program's memory happens to lie makes it up to 5 % faster or slower for as long as it
    runs, so that blocks of one layout agree with each other and not with the next run's. Laid out anew, each block is
    an independent draw, and the interval holds that too (Curtsinger and Berger, "Stabilizer", ASPLOS 2013).
    """
    return setup.stepper_at(trained.state, trained.updates)


def untimed_steps(steps: int, backend: Any) -> int:
    """Returns how many steps a fresh backend takes before a block of ``steps``: after another's turn caches are cold,
    and fresh pages are not mapped yet; and all of the backend's warm-up is over, such as the capture of a graph."""
    return max(warmup_steps(backend) + 1, steps // 4)


def time_block(stepper: Stepper, stream: Stream, steps: int, clock: Clock, lines: Lines | None = None) -> TimedBlock:
    """Takes ``steps`` bare steps: nothing is read or written between them. The block ends when the loss of the last one
    and a line of every weight (``lines``, or others) have been read."""
    lines = lines or Lines(stepper.backend)
    loss: Any = float("nan")
    start = time.perf_counter()
    clock.mark()
    for batch in islice(stream, steps):
        loss = stepper.step(batch)
    returned = time.perf_counter()
    loss, read = float(loss), lines.read(clock)
    clock.mark()
    (block_ms,) = clock.read()
    end, steps = time.perf_counter(), max(steps, 1)
    return TimedBlock(block_ms / steps, (end - start) * 1e3 / steps, (end - returned) * 1e3, loss, lines, read)
