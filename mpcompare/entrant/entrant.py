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

A run that was trained and examined in a sweep that was killed has one pass for both, ``taken``.
"""

from collections.abc import Callable, Generator, Iterator
from typing import Any

from mpcompare.clean_process import CleanProcess
from mpcompare.entrant import blocks, examination, inference, memory, passes, phases, training
from mpcompare.entrant.plan import Plan
from mpcompare.entrant.state import Entrant
from mpcompare.race import timetable
from mpcompare.race.orders import Progress, Turn, Turns
from mpcompare.records import RunRecorder
from mpcompare.shared import ALONE, Shared

Take = Callable[[Entrant], Any]


def compete(plan: Plan, recorder: RunRecorder, shared: Shared = ALONE, clean: CleanProcess | None = None) -> Turns:
    """Takes all passes of one run, turn by turn (``race``). Each pass is recorded before the next one begins."""
    yield Turn()  # what is slow to import is imported
    entrant = Entrant(plan, recorder, shared, clean)
    for stage, take in _passes(entrant):
        if stage != timetable.TIMING:  # the race says when that begins
            yield Progress(0, 1, "", stage)
        part = take(entrant)
        if isinstance(part, Generator):
            part = yield from part
        recorder.add(**(part if isinstance(part, dict) else vars(part)))
    recorder.add(status="ok")
    yield Progress(1, 1, "done")


def _passes(entrant: Entrant) -> Iterator[tuple[str, Take]]:
    """Yields each pass with the stage (``race/timetable.py``) of which it is a part. A pass that takes turns is a
    generator."""
    yield timetable.SET_UP, passes.find_checkpoint  # finds out whether the run is ``taken``
    yield timetable.SET_UP, passes.make_setup
    yield timetable.SET_UP, passes.record_machine
    yield timetable.SET_UP, passes.find_start
    yield timetable.TRAINING, passes.take_as_it_is if entrant.taken else training.take
    yield timetable.TRAINING, passes.try_length
    if not entrant.taken:
        yield timetable.EXAMINATION, examination.take
    yield timetable.TIMING, blocks.take
    yield timetable.PHASES, phases.take
    yield timetable.MEMORY, memory.take
    yield timetable.INFERENCE, inference.take
