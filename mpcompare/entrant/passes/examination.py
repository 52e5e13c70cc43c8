"""The pass that examines the trained backend for the verdict, and observes in which precision each layer runs."""

import logging
import time
from collections.abc import Generator
from dataclasses import dataclass

from mpcompare.contract import ModuleDtypes
from mpcompare.entrant.evaluation import held_out_of
from mpcompare.entrant.state import Entrant, Pass
from mpcompare.errors import first_line, want_of_memory
from mpcompare.instruments import heap, memory_limit
from mpcompare.precision import PRECISIONS
from mpcompare.race.orders import Progress
from mpcompare.verdict.examine.examine import examine
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.findings import to_document

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Observed:
    """A part of ``result.json``.

    Attributes:
        module_dtypes: :meth:`mpcompare.contract.Backend.module_dtypes`.
    """

    module_dtypes: ModuleDtypes


@dataclass(frozen=True)
class Examined(Observed):
    """The part of a run that was examined.

    Attributes:
        examine_s: seconds that it took.
        examine_peak_bytes: the most memory that it took; None where that is not known.
        examine_stopped: the error with which all of it stopped, in a line; empty where it did not. Nothing was found
            then.
    """

    examine_s: float
    examine_peak_bytes: int | None
    examine_stopped: str


def take(entrant: Entrant) -> Pass[Observed]:
    """Needs ``setup``, ``start``, ``trained``, ``memory`` and ``stepper``, which it frees where it does not examine it.
    Ends ``apart``, and leaves nothing."""
    setup, enabled, stopped = entrant.setup, entrant.plan.verdict.enabled, ""
    entrant.memory.begin()
    with memory_limit.limited(), heap.kept():
        began = time.monotonic()
        if enabled:
            stopped = yield from _examine(entrant)
        peak = entrant.memory.peak()
        if entrant.apart is not None:
            entrant.apart.close()
        if not enabled:
            del entrant.stepper
        seconds = time.monotonic() - began
        yield Progress(0, 1, "dtypes of each layer")
        dtypes = setup.new_backend().module_dtypes(*next(setup.batches())[0])
    return Examined(dtypes, seconds, peak, stopped) if enabled else Observed(dtypes)


def _examine(entrant: Entrant) -> Generator[Progress, None, str]:
    """Writes ``numerics.json``; returns the error with which the examination stopped, or nothing."""
    plan, trained = entrant.plan, entrant.trained
    noise = plan.verdict.noise if plan.is_baseline else 0
    try:
        found = yield from examine(
            _subject(entrant), entrant.stepper, trained.rows, trained.moved, noise, trained.moves
        )
    except Exception as error:  # the backend has trained, and can be timed
        log.warning("the examination stopped", exc_info=error)
        return want_of_memory(error) or first_line(error)
    entrant.recorder.numerics(to_document(found))
    return ""


def _subject(entrant: Entrant) -> Subject:
    setup, steps = entrant.setup, len(entrant.trained.rows)
    return Subject(
        make_backend=setup.make_backend,
        model=setup.model,
        scaling=setup.loss_scale,
        precision=PRECISIONS[setup.precision],
        task=setup.task,
        batches=setup.batches,
        lent=setup.lent,
        start=entrant.start.origin,
        held_out=held_out_of(setup.model, setup.dataset, setup.task, steps),
        shared=entrant.shared,
        apart=entrant.apart,
        seed=entrant.plan.seed,
    )
