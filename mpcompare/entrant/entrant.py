"""One entrant from first to last: a list of passes. It takes turns, so that several can be compared.

checkpoint    the checkpoint that training continues from, if there is one
setup         device, precision, network, data and clock, made once
provenance    the machine, its software and their flags
start         the point where training begins
training      every step recorded, evaluated and monitored as asked for
trial         the losses of the steps that will be timed
examination   the numbers of the verdict, and the dtypes of each layer
blocks        the time of a step: blocks of bare steps, in turns with the others
phases        the time of each phase
memory        the bytes that must be live
inference     the trained network in each precision, forward only

A run that was trained and examined in a sweep that was killed has one pass for both, ``taken``. The passes that prepare
the others stand here. Each other pass has a file of its own.
"""

import logging
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from mpcompare.clean_process import CleanProcess
from mpcompare.contract import State
from mpcompare.entrant import blocks, examination, inference, memory, phases, resume, training
from mpcompare.entrant.plan import Plan
from mpcompare.entrant.setup import device_and_precision, set_up
from mpcompare.entrant.state import Entrant, ExaminedMemory, Fields, Start, Trained
from mpcompare.entrant.timing import fresh, try_block
from mpcompare.fields import SetUpRecord
from mpcompare.instruments import machine
from mpcompare.race import timetable
from mpcompare.race.orders import Progress, Turn, Turns
from mpcompare.records import EXAMINED, WENT_ON, RunRecorder, numbers
from mpcompare.shared import ALONE, Shared

log = logging.getLogger(__name__)

Take = Callable[[Entrant], Any]


def compete(plan: Plan, recorder: RunRecorder, shared: Shared = ALONE, clean: CleanProcess | None = None) -> Turns:
    """Takes all passes of one run, turn by turn (``race``). Each pass is recorded before the next one begins."""
    device_and_precision(plan)  # wrong ones end the run before the first of its race trains
    yield Turn()  # the modules that are slow to import are there
    entrant = Entrant(plan, recorder, shared, clean)
    for stage, take in _passes(entrant):
        if stage == timetable.TRAINING:
            yield Progress(entrant.start.step, plan.train.last_step, "", stage)
        elif stage != timetable.TIMING:  # the race says when that begins
            yield Progress(0, 1, "", stage)
        part = take(entrant)
        if isinstance(part, Generator):
            part = yield from part
        recorder.add(**(part if isinstance(part, dict) else vars(part)))
    recorder.add(status="ok")
    yield Progress(1, 1, "done")


def _passes(entrant: Entrant) -> Iterator[tuple[str, Take]]:
    """Yields each pass with its stage (``race/timetable.py``). A pass that takes turns is a generator."""
    yield timetable.SET_UP, find_checkpoint  # finds out whether the run is ``taken``
    yield timetable.SET_UP, make_setup
    yield timetable.SET_UP, lambda entrant: machine.provenance(entrant.setup.device)  # with the flags of the setup
    yield timetable.SET_UP, find_start
    yield timetable.TRAINING, take_as_it_is if entrant.taken else training.take
    yield timetable.TRAINING, try_length
    if not entrant.taken:
        yield timetable.EXAMINATION, examination.take
    yield timetable.TIMING, blocks.take
    yield timetable.PHASES, phases.take
    yield timetable.MEMORY, memory.take
    yield timetable.INFERENCE, inference.take


def find_checkpoint(entrant: Entrant) -> Fields:
    """Reads the checkpoint to continue from, before anything is made: a wrong checkpoint ends the run at once.

    Needs nothing. Leaves ``checkpoint`` and ``taken``.
    """
    plan, result = entrant.plan, entrant.recorder.result
    saved = entrant.checkpoint = resume.find(plan, result)
    entrant.taken = EXAMINED in result and saved is not None and saved.step == plan.train.last_step
    return {}


def make_setup(entrant: Entrant) -> SetUpRecord:
    """Makes device, precision, network, data and clock.

    Needs nothing. Leaves ``memory`` and ``setup``. Nothing is examined if the data are not finite.
    """
    entrant.memory = ExaminedMemory(entrant.clean)
    setup = entrant.setup = set_up(entrant.plan, entrant.shared)
    if setup.record.not_finite:  # a backend is not to blame for such data
        entrant.plan = replace(entrant.plan, verdict=replace(entrant.plan.verdict, enabled=False))
    return setup.record


def find_start(entrant: Entrant) -> Fields:
    """Finds where training begins: at the initial weights, or at a checkpoint of the same task.

    Needs ``checkpoint``, ``taken`` and ``setup``. Leaves ``start``. If the run goes on, its record gets the folder that
    it was in, the machine that it was on, and the step after which it goes on; None where all of it is taken. A run
    that begins anew goes on with none.
    """
    plan, setup, saved, recorder = entrant.plan, entrant.setup, entrant.checkpoint, entrant.recorder
    if saved is None:
        recorder.keep(0)
        entrant.start = Start(setup, None)
        return {WENT_ON: None} if plan.resume.goes_on else {}
    goes_on = plan.resume.goes_on
    folder = Path(recorder.result[WENT_ON]["path"]) if goes_on else plan.resume.folder
    checkpoint = resume.fit(saved, resume.what_is_trained(plan, setup), setup.loss_scale, folder)
    resume.check_tensors(checkpoint, setup.model, folder)
    moves = plan.verdict.enabled and not entrant.taken
    before = resume.before(recorder, saved.step, moves) if goes_on else None
    entrant.start = Start(setup, checkpoint, before or resume.NOTHING)
    if before is None:
        return {"resumed_from": resume.describe(checkpoint, folder)}
    log.info("taken as it is from %s" if entrant.taken else f"goes on after step {saved.step} of %s", folder)
    return {WENT_ON: {**recorder.result[WENT_ON], "step": None if entrant.taken else saved.step}}


def take_as_it_is(entrant: Entrant) -> Fields:
    """Takes a run that was trained and examined before its sweep was killed as it is: it is only timed.

    Needs ``start``, at the end of training. Leaves ``stepper`` and ``trained``, and ends ``clean``.
    """
    start, result = entrant.start, numbers(entrant.recorder.result)
    assert start.checkpoint is not None
    if entrant.clean is not None:
        entrant.clean.close()
    entrant.stepper = start.new_stepper()
    entrant.trained = Trained(
        rows=start.before.rows,
        state=partial(cast, State, start.checkpoint.state),
        updates=start.checkpoint.updates,
        scores={"test_loss": result["test_loss"], "test_accuracy": result["test_accuracy"]},
        moved={},
    )
    return {}


def try_length(entrant: Entrant) -> Fields:
    """Tries out how many steps a timed block has.

    Needs ``setup``, ``trained`` and ``stepper``. Leaves ``trial``.

    A backend that will be examined stays as training left it, and another backend takes the steps. Without an
    examination the trained backend takes them itself, so that there is one backend in memory.
    """
    setup, examined = entrant.setup, entrant.plan.verdict.enabled
    stepper = fresh(setup, entrant.trained) if examined else entrant.stepper
    entrant.trial = try_block(stepper, setup.batches(), entrant.plan.measure.block_s, setup.clock)
    return {}
