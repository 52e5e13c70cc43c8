"""The time of a step: blocks of bare steps, in turns with the other entrants."""

import random
import time
from collections.abc import Generator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from mpcompare.contract import Stepper, warmup_steps
from mpcompare.entrant.rows import keep
from mpcompare.entrant.setup import Setup, Stream
from mpcompare.entrant.training import Trained
from mpcompare.instruments import meter
from mpcompare.instruments.bystanders import Bystanders, Rest
from mpcompare.instruments.clock import Clock, settle
from mpcompare.race.turns import Finish, Order, Progress, Time, Turn
from mpcompare.records import Recorder


@dataclass(frozen=True)
class Trial:
    """A block as the trained backend itself takes it, which goes on as it is and is never loaded.

    Attributes:
        steps: the number of steps of a timed block.
        untimed: the number of steps before it that are not timed.
        losses: of the untimed steps before the block, of its own steps, and of one more after it.
    """

    steps: int
    untimed: int
    losses: list[float]


def try_block(stepper: Stepper, stream: Stream, block_s: float, clock: Clock) -> Trial:
    """Finds the number of steps that take about ``block_s`` seconds, at least one, and takes a block of so many."""
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
    untimed = untimed_steps(steps, stepper.backend)
    total = untimed + steps + 1
    losses += [keep(stepper.step(batch)) for batch in islice(stream, max(total - len(losses), 0))]
    return Trial(steps, untimed, [float(loss) for loss in losses[:total]])


@dataclass(frozen=True)
class Blocks:
    """The timed blocks of one entrant.

    Attributes:
        finish: the order that ended them.
        step_ms: milliseconds a step of each block.
        difference: the largest difference between a loss in a block and the trial's at the same step. Three are
            compared: of the first untimed step, of the last timed one, and of one more after it, which depends on every
            update before it. So what is timed is what was examined.
    """

    finish: Finish
    step_ms: list[float]
    difference: float


def take_turns(
    setup: Setup, trained: Trained, trial: Trial, recorder: Recorder, text: str
) -> Generator[Progress | Turn, Order | None, Blocks]:
    """Times a block of steps a turn, as long as the race orders it; ``text`` is said at the end of the turn before."""
    step_ms, difference, bystanders, rest = [], 0.0, Bystanders(setup.device), Rest()
    order = yield Turn(text=text)
    untimed = trial.untimed
    while isinstance(order, Time):
        between = rest.stop()
        padding, stepper, stream = _padding(setup.device), fresh(setup, trained), setup.batches()
        losses: dict[int, Any] = {0: keep(stepper.step(next(stream)))}
        time_block(stepper, stream, untimed - 1, setup.clock)
        bystanders.start()
        ms, wall_ms, losses[untimed + trial.steps - 1] = time_block(stepper, stream, trial.steps, setup.clock)
        load = bystanders.stop()
        losses[untimed + trial.steps] = keep(stepper.step(next(stream)))
        for step, loss in losses.items():
            difference = max(difference, abs(float(loss) - trial.losses[step]))
        del padding, stepper
        meter.release()
        settled = settle()
        step_ms.append(ms)
        row = {"round": order.round, "steps": trial.steps, "step_ms": ms, "wall_ms": wall_ms, **load}
        recorder.block({**row, "settled": settled, "cores_between_turns": between})
        rest.start()
        order = yield Turn(ms)
    assert isinstance(order, Finish)
    return Blocks(order, step_ms, difference)


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


def _padding(device: torch.device) -> Tensor:
    """Returns up to 4 MB, which shift all tensors that are allocated after it."""
    return torch.empty(random.randrange(1 << 12, 1 << 22), dtype=torch.uint8, device=device)


def time_block(stepper: Stepper, stream: Stream, steps: int, clock: Clock) -> tuple[float, float, Any]:
    """Takes ``steps`` bare steps: nothing is read or written between them.

    Returns:
        Milliseconds a step by the clock, those by the wall, and the loss of the last step (NaN where there is none).
    """
    loss: float | Tensor = float("nan")
    start = time.perf_counter()
    clock.mark()
    for batch in islice(stream, steps):
        loss = stepper.step(batch)
    clock.mark()
    (block_ms,) = clock.read()
    steps = max(steps, 1)
    return block_ms / steps, (time.perf_counter() - start) * 1e3 / steps, keep(loss)
