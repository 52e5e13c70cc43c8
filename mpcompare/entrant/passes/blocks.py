"""The pass that times blocks of bare steps, in turns with the other entrants of the race."""

from dataclasses import dataclass, replace
from typing import Any

from mpcompare.contract import Stepper
from mpcompare.cost.flops import step_flops
from mpcompare.entrant.beside import Beside, beside
from mpcompare.entrant.state import Entrant, Pass
from mpcompare.entrant.timing import Blocks, take_turns
from mpcompare.instruments import meter
from mpcompare.instruments.clock import percentiles, settle


@dataclass(frozen=True)
class BlocksPart:
    """A part of ``result.json``.

    Attributes:
        step_ms_p20, step_ms_p50, step_ms_p80: milliseconds a step, quantiles of the blocks.
        samples_per_s: by the median.
        flops_per_step, tflops: operations of the products, and 1e12 of them a second; None where they are not known.
        timing: :class:`mpcompare.race.turns.Finish`.
        timed_unfinished: :attr:`mpcompare.entrant.timing.Blocks.unfinished`.
    """

    step_ms_p20: float
    step_ms_p50: float
    step_ms_p80: float
    samples_per_s: float
    flops_per_step: int | None
    tflops: float | None
    timing: dict[str, Any]
    timed_unfinished: int


@dataclass(frozen=True)
class ComparedPart(BlocksPart, Beside):
    """The part of a run that was examined: a timed block, the one that the race drew, stands beside the trained
    backend's."""


def take(entrant: Entrant) -> Pass[BlocksPart]:
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
    compared = beside(setup, stepper, trained.state, ended, (trial.untimed, trial.steps))
    return ComparedPart(**vars(part), **vars(compared))


def _part(entrant: Entrant, blocks: Blocks) -> BlocksPart:
    task, timed = entrant.setup.task, percentiles(blocks.step_ms)
    seconds = timed["step_ms_p50"] / 1e3
    x, y = next(entrant.setup.batches())[0]
    micro_batch_flops = step_flops(entrant.setup.model, task.loss_fn, x, y)
    flops = None if micro_batch_flops is None else task.accumulate * micro_batch_flops
    return BlocksPart(
        **timed,
        samples_per_s=task.batch_size / seconds,
        flops_per_step=flops,
        tflops=None if flops is None else flops / seconds / 1e12,
        timing=vars(blocks.finish),
        timed_unfinished=blocks.unfinished,
    )


def _describe_training(entrant: Entrant) -> str:
    setup, rows = entrant.setup, entrant.trained.rows
    first, last = rows[0], rows[-1]
    return (
        f"{setup.engine}, {setup.dataset.name}, {len(rows)} steps, loss {last['loss']:.4f}, "
        f"first step {first['step_ms']:.4g} ms, last {last['step_ms']:.4g} ms"
    )
