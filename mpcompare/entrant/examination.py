"""The pass that examines the trained backend for the verdict, and observes in which precision each layer runs."""

import logging
import time
from collections.abc import Generator

from mpcompare.entrant.evaluation import held_out_of
from mpcompare.entrant.state import Entrant, Fields, Pass
from mpcompare.errors import first_line, want_of_memory
from mpcompare.fields import ExaminedRecord
from mpcompare.instruments import heap, memory_limit
from mpcompare.precision import PRECISIONS
from mpcompare.race.orders import Progress
from mpcompare.verdict.examine.examine import examine
from mpcompare.verdict.examine.foretold import Held, foretold
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.findings import to_document

log = logging.getLogger(__name__)


def take(entrant: Entrant) -> Pass[Fields]:
    """Needs ``setup``, ``start``, ``trained``, ``memory`` and ``stepper``, which it frees if it does not examine the
    backend. Ends ``clean``, and leaves nothing."""
    setup, enabled, stopped = entrant.setup, entrant.plan.verdict.enabled, ""
    held = entrant.memory.begin()
    needed = _foretold(entrant, held) if enabled and held is not None else None
    refused = _want(needed - held) if needed is not None and held is not None else ""
    with memory_limit.limited(), heap.kept():
        began = time.monotonic()
        if enabled and not refused:
            stopped = yield from _examine(entrant)
        peak = entrant.memory.peak()
        if entrant.clean is not None:
            entrant.clean.close()
        if not enabled:
            del entrant.stepper
        seconds = time.monotonic() - began
        yield Progress(0, 1, "dtypes of each layer")
        dtypes = setup.new_backend().module_dtypes(*next(setup.batches())[0])
    if not enabled:
        return {"module_dtypes": dtypes}
    examined = ExaminedRecord(
        examine_s=seconds,
        examine_foretold_bytes=needed,
        examine_peak_bytes=peak,
        examine_refused=refused,
        examine_stopped=stopped,
    )
    return {"module_dtypes": dtypes, **vars(examined)}


def _foretold(entrant: Entrant, held: int) -> int | None:
    """Returns the bytes that the examination will take; None where the bytes of a step are not known, or the network
    cannot be counted."""
    setup, result = entrant.setup, entrant.recorder.result
    before, most = result["rss_before_bytes"], result["peak_rss_bytes"]
    if before is None or most is None or setup.device.type != "cpu":
        return None
    params = [p.nbytes for p in setup.model.parameters()]
    moments = [t.nbytes for kept in entrant.stepper.backend.state_dict()["optimizer"].values() for t in kept.values()]
    known = Held(held, sum(params), max(params), sum(moments), most - before)
    precision, batch = PRECISIONS[setup.record.precision], next(setup.batches())
    try:
        return foretold(known, setup.model, setup.task.loss_fn, batch, precision, entrant.clean is None)
    except Exception as error:  # a network may raise anything
        log.warning(f"the memory of the examination is not foretold ({first_line(error)})")
        return None
    finally:
        heap.trim()  # the counting is no part of what is foretold


def _want(needed: int) -> str:
    """Returns a line on the memory that is missing; empty where there is enough."""
    if needed <= (there := memory_limit.available_bytes()):
        return ""
    line = (
        f"it needs {needed / 1e9:.3g} GB more and {there / 1e9:.3g} GB are left: a smaller task.batch_size or "
        "task.model needs less, and verdict.enabled=false leaves it out"
    )
    log.warning(f"the backend is not examined: {line}")
    return line


def _examine(entrant: Entrant) -> Generator[Progress, None, str]:
    """Writes ``numerics.json``. Returns the error with which the examination stopped, or an empty text."""
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
        precision=PRECISIONS[setup.record.precision],
        task=setup.task,
        batches=setup.batches,
        lent=setup.lent,
        start=entrant.start.origin,
        held_out=held_out_of(setup.model, setup.dataset, setup.task, steps),
        shared=entrant.shared,
        clean=entrant.clean,
        seed=entrant.plan.seed,
    )
