"""The pass that times blocks of bare steps, in turns with the other entrants of the race; and one of them compared with
the same block of the backend that was trained and examined."""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, islice

import torch
from torch import Tensor

from mpcompare.contract import State, Stepper
from mpcompare.cost.flops import step_flops
from mpcompare.entrant.sample import Ended
from mpcompare.entrant.setup import Setup
from mpcompare.entrant.state import Entrant, Pass
from mpcompare.entrant.timing import Blocks, take_turns
from mpcompare.fields import BlocksRecord, ComparedRecord, Distance
from mpcompare.instruments import meter
from mpcompare.instruments.clock import percentiles, settle
from mpcompare.verdict.examine import numerics


def take(entrant: Entrant) -> Pass[BlocksRecord]:
    """Needs ``setup``, ``trained``, ``trial``, and of a run that was examined ``stepper``, which it frees. Leaves
    nothing.

    Blocks have the learning rates of the first updates: many schedules end at 0, where no weight tells what was done.
    """
    setup, trial, examined = entrant.setup, entrant.trial, entrant.plan.verdict.enabled
    trained = replace(entrant.trained, updates=0)
    if examined:  # it has taken a step more in its examination, and goes on from here with a timed block
        trained = replace(trained, read=entrant.shared.aside(entrant.stepper.backend.state_dict()))
    settle()
    with meter.frozen():
        text = _describe_training(entrant)
        blocks = yield from take_turns(setup, trained, trial, entrant.recorder, text, kept=examined)
    part = _part(entrant, blocks)
    if not examined:
        return part
    stepper = Stepper(entrant.stepper.backend, setup.task.new_rates(trained.updates))
    del entrant.stepper
    ended = blocks.ends[blocks.finish.compared]
    return _compared(part, setup, stepper, trained.state, ended, (trial.untimed, trial.steps))


def _part(entrant: Entrant, blocks: Blocks) -> BlocksRecord:
    task, timed = entrant.setup.task, percentiles(blocks.step_ms)
    seconds = timed["step_ms_p50"] / 1e3
    x, y = next(entrant.setup.batches())[0]
    micro_batch_flops = step_flops(entrant.setup.model, task.loss_fn, x, y)
    flops = None if micro_batch_flops is None else task.accumulate * micro_batch_flops
    return BlocksRecord(
        step_ms_p20=timed["step_ms_p20"],
        step_ms_p50=timed["step_ms_p50"],
        step_ms_p80=timed["step_ms_p80"],
        samples_per_s=task.batch_size / seconds,
        flops_per_step=flops,
        tflops=None if flops is None else flops / seconds / 1e12,
        timing=blocks.finish,
        timed_unfinished=blocks.unfinished,
    )


def _describe_training(entrant: Entrant) -> str:
    setup, rows = entrant.setup, entrant.trained.rows
    first, last = rows[0], rows[-1]
    return (
        f"{setup.record.engine}, {setup.dataset.name}, {len(rows)} steps, loss {last['loss']:.4f}, "
        f"first step {first['step_ms']:.4g} ms, last {last['step_ms']:.4g} ms"
    )


def _compared(
    part: BlocksRecord, setup: Setup, trained: Stepper, state: State, ended: Ended, steps: tuple[int, int]
) -> ComparedRecord:
    """Lets the trained backend, which was never loaded, take a block that was timed; returns how far apart the two are.

    Args:
        trained: is in ``state``, at the learning rate with which the block began.
        steps: the numbers of steps of the block before the clock started, and after it.
    """
    torch.manual_seed(ended.seeds[0])
    streams = (islice(setup.drawn_batches(seed), number) for seed, number in zip(ended.seeds, steps, strict=True))
    start = ended.sample.of(state["params"], state["buffers"], state["optimizer"])
    losses = [float(trained.step(batch)) for batch in chain.from_iterable(streams)]
    backend = trained.backend
    expected = ended.sample.of(backend.master_params(), backend.buffers(), backend.state_dict()["optimizer"])
    first, last = (abs(mine - its) for mine, its in zip(ended.losses, (losses[0], losses[-1]), strict=True))
    return ComparedRecord(
        **vars(part),
        timed_loss=losses[-1],
        timed_loss_difference=max(first, last) if not math.isnan(first + last) else math.nan,
        timed_state={
            kind: _apart(start.get(kind, {}), tensors, ended.left.get(kind, {})) for kind, tensors in expected.items()
        },
        timed_steps=sum(steps),
    )


def _apart(before: Mapping[str, Tensor], expected: Mapping[str, Tensor], left: Mapping[str, Tensor]) -> Distance:
    """Returns the distances of one kind; a tensor that is missing is one of zeros."""
    zeros = {name: torch.zeros_like(t) for name, t in expected.items()}
    return Distance(
        difference=numerics.distance(expected, {**zeros, **left}),
        moved=numerics.distance(expected, {**zeros, **before}),
        norm=numerics.distance(expected, zeros),
    )
