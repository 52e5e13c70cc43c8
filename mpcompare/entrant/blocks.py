"""The pass that times blocks of bare steps, in turns with the other entrants of the race. One block is compared with
the same block of the backend that was trained and examined."""

import math
import random
import time
from collections.abc import Generator, Mapping
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from mpcompare import generators
from mpcompare.contract import State, Stepper
from mpcompare.entrant.sample import Ended, Lines, Sample
from mpcompare.entrant.setup import Setup
from mpcompare.entrant.state import Entrant, Pass, Trained, Trial
from mpcompare.entrant.timing import fresh, time_block
from mpcompare.fields import BlocksRecord, ComparedRecord, Distance
from mpcompare.instruments import meter
from mpcompare.instruments.bystanders import Bystanders, Rest
from mpcompare.instruments.clock import percentiles, settle
from mpcompare.numerals import short
from mpcompare.race.orders import Conclude, Finish, Order, Prepare, Time, Turn
from mpcompare.records import BLOCKS
from mpcompare.verdict.examine import numerics


def take(entrant: Entrant) -> Pass[BlocksRecord]:
    """Needs ``setup``, ``trained``, ``trial``, and, if the run was examined, ``stepper``, which it frees. Leaves
    nothing.

    Blocks have the learning rates of the first updates: many schedules end at 0, where no weight tells what was done.
    """
    setup, trial, examined = entrant.setup, entrant.trial, entrant.plan.verdict.enabled
    trained = replace(entrant.trained, updates=0)
    if examined:  # the backend took a step more in its examination, and goes on from here with a timed block
        trained = replace(trained, state=entrant.shared.aside(entrant.stepper.backend.state_dict()))
    settle()
    rows: list[dict[str, Any]] = []
    ends: dict[int, Ended] = {}  # the end of each block, by its round: any block may be compared
    with meter.frozen():
        text = _describe_training(entrant)
        rest = Rest()
        order = yield Turn(text=text)
        while isinstance(order, Prepare):
            waited = rest.stop()
            row, end = yield from _block(setup, trained, trial, order, kept=examined)
            meter.release()
            entrant.recorder.append(BLOCKS, [{**row, **waited, "settled": settle()}])
            rows.append(row)
            if end:
                ends[row["round"]] = end
            rest.start()
            order = yield Turn()
    assert isinstance(order, Finish)
    part = _part(setup, rows, order)
    if not examined:
        return part
    stepper = Stepper(entrant.stepper.backend, setup.task.new_rates(trained.updates))
    del entrant.stepper
    return _compared(part, setup, stepper, trained.state(), ends[order.compared], (trial.untimed, trial.steps))


def _block(
    setup: Setup, trained: Trained, trial: Trial, order: Prepare, kept: bool
) -> Generator[Turn, Order | None, tuple[dict[str, Any], Ended | None]]:
    """Times one block. Returns its row of ``blocks.csv``, and its end if it is to be ``kept``."""
    bystanders, shift = Bystanders(setup.device), random.randrange(1 << 12, 1 << 22)
    padding = torch.empty(shift, dtype=torch.uint8, device=setup.device)  # shifts all that is allocated after it
    stepper = fresh(setup, trained)  # its constructor may draw numbers, too
    generators.seed(order.seed)  # for a backend that draws numbers: the trained one will draw the same
    untimed = setup.drawn_batches(order.seed)
    first = float(stepper.step(next(untimed)))
    time_block(stepper, untimed, trial.untimed - 1, setup.clock)
    lines = Lines(stepper.backend.master_params())
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


def _part(setup: Setup, rows: list[dict[str, Any]], finish: Finish) -> BlocksRecord:
    task, timed = setup.task, percentiles([row["step_ms"] for row in rows])
    seconds = timed["step_ms_p50"] / 1e3
    flops = setup.flops_of_step()
    return BlocksRecord(
        **timed,
        samples_per_s=task.batch_size / seconds,
        flops_per_step=flops,
        tflops=None if flops is None else flops / seconds / 1e12,
        timing=finish,
        timed_unfinished=sum(not row["finished"] for row in rows),
    )


def _describe_training(entrant: Entrant) -> str:
    setup, rows = entrant.setup, entrant.trained.rows
    first, last, steps = rows[0], rows[-1], f"{len(rows)} step{'' if len(rows) == 1 else 's'}"
    return (
        f"{setup.record.engine}, {setup.dataset.name}, {steps}, loss {last['loss']:.4f}, "
        f"first step {short(first['step_ms'])} ms, last {short(last['step_ms'])} ms"
    )


def _compared(
    part: BlocksRecord, setup: Setup, trained: Stepper, state: State, ended: Ended, steps: tuple[int, int]
) -> ComparedRecord:
    """Lets the trained backend, which was never loaded, take a timed block. Returns how far apart both blocks end.

    Args:
        trained: is in ``state``, at the learning rate with which the block began.
        steps: the numbers of steps of the block before the clock started, and after it.
    """
    generators.seed(ended.seeds[0])
    streams = (islice(setup.drawn_batches(seed), number) for seed, number in zip(ended.seeds, steps, strict=True))
    start = ended.sample.of(state["params"], state["buffers"], state["optimizer"])
    losses = [float(trained.step(batch)) for batch in chain.from_iterable(streams)]
    backend = trained.backend
    expected = ended.sample.of(backend.master_params(), backend.buffers(), backend.state_dict()["optimizer"])
    first, last = map(_losses_apart, ended.losses, (losses[0], losses[-1]))
    return ComparedRecord(
        **vars(part),
        timed_loss=losses[-1],
        timed_loss_difference=max(first, last) if not math.isnan(first + last) else math.nan,
        timed_state={
            kind: _apart(start.get(kind, {}), tensors, ended.left.get(kind, {})) for kind, tensors in expected.items()
        },
        timed_steps=sum(steps),
    )


def _losses_apart(mine: float, its: float) -> float:
    """Returns the distance of two losses: 0 for equal infinite ones, and where none of the two is a number."""
    alike = mine == its or (math.isnan(mine) and math.isnan(its))
    return 0.0 if alike else abs(mine - its)


def _apart(before: Mapping[str, Tensor], expected: Mapping[str, Tensor], left: Mapping[str, Tensor]) -> Distance:
    """Returns the distances of one kind. A missing tensor counts as a tensor of zeros."""
    zeros = {name: torch.zeros_like(t) for name, t in expected.items()}
    return Distance(
        difference=numerics.distance(expected, {**zeros, **left}),
        moved=numerics.distance(expected, {**zeros, **before}),
        norm=numerics.distance(expected, zeros),
    )
