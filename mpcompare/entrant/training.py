"""The pass that trains, with every step recorded and checkpoints saved, and evaluates in the end."""

import logging
import time
from collections.abc import Generator, Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any

import torch

from mpcompare import generators
from mpcompare.checkpoints import CHECKPOINTS, Checkpoint, save
from mpcompare.contract import Backend
from mpcompare.dtypes import torch_dtype
from mpcompare.entrant.evaluation import record_evaluation
from mpcompare.entrant.monitor import Monitor
from mpcompare.entrant.resume import what_is_trained
from mpcompare.entrant.rows import Rows
from mpcompare.entrant.setup import Setup
from mpcompare.entrant.state import Entrant, Pass, Start, Trained
from mpcompare.fields import TrainingRecord
from mpcompare.instruments import meter, slow_products
from mpcompare.numerals import short
from mpcompare.precision import PRECISIONS
from mpcompare.race.orders import Progress
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.midway import Midway
from mpcompare.verdict.examine.moves import Digest

log = logging.getLogger(__name__)

WRITE_EVERY_S = 0.1  # steps are written at least this often


def checkpoint_of(
    backend: Backend, step: int, updates: int, what_is_trained: Mapping[str, Any], device: torch.device
) -> Checkpoint:
    """Returns everything that the steps after ``step`` depend on; so many ``updates`` were taken. Its tensors are the
    backend's own, which the next step changes."""
    return Checkpoint(
        state=backend.state_dict(),
        step=step,
        updates=updates,
        position=step,  # a batch a step
        what_is_trained=what_is_trained,
        generators=generators.saved(device),
    )


def take(entrant: Entrant) -> Pass[TrainingRecord]:
    """Needs ``setup`` and ``start``. Leaves ``stepper`` and ``trained``."""
    plan, setup, start, recorder = entrant.plan, entrant.setup, entrant.start, entrant.recorder
    _warn_of_slow_products(setup)
    rss_before = meter.rss_bytes() if meter.reset_peak_rss() else None
    stepper = start.new_stepper()
    if plan.verdict.enabled:
        stepper = Midway(stepper, setup.task.schedule, start.step, plan.train.last_step)
    entrant.stepper = stepper
    storage = PRECISIONS[setup.record.precision].storage
    digest = Digest(stepper.backend, torch_dtype(storage)) if plan.verdict.enabled else None
    rows = Rows(recorder, setup.clock, setup.task.clip_norm, plan.train.warmup_steps, start.step, plan.seed, digest)
    yield from _train(entrant, rows, Monitor(setup.task, storage, setup.clock))
    peak_rss = meter.peak_rss_bytes()  # taken before the last evaluation, which has activations of its own
    backend, steps = stepper.backend, [*start.before.rows, *rows.written]
    scores = record_evaluation(setup, recorder, steps[-1]["step"], backend)
    entrant.trained = Trained(
        rows=steps,
        state=entrant.shared.aside(backend.state_dict()),
        updates=_updates(start, rows),
        scores=scores,
        moved=numerics.sketch_of_change(start.params, backend.master_params()),
        moves=start.before.with_moves(digest.moves()) if digest else None,
    )
    return TrainingRecord(
        first_step_ms=steps[0]["step_ms"],
        skipped_steps=sum(step["skipped"] for step in steps),
        final_loss=steps[-1]["loss"],
        final_loss_scale=float(backend.loss_scale()),
        engine=backend.engine,
        dtypes=backend.dtypes(),
        rss_before_bytes=rss_before,
        peak_rss_bytes=peak_rss,
        test_loss=scores["test_loss"],
        test_accuracy=scores["test_accuracy"],
    )


def _warn_of_slow_products(setup: Setup) -> None:
    """Says if a step will take long because this CPU has no instructions for torch's 16-bit products."""
    precision = PRECISIONS[setup.record.precision]
    multiplies = setup.record.engine == "torch" and setup.device.type == "cpu" and precision.is_16_bit
    if multiplies and (line := slow_products.warning(precision.storage, lambda: setup.flops_of_step() or 0)):
        log.warning(line)


def _train(entrant: Entrant, rows: Rows, monitor: Monitor) -> Generator[Progress, Any, None]:
    """Trains to the end. However training ends, the rows of all steps that were taken are on disk. The rows before a
    checkpoint are there when it is saved. The time of saving is in no step's time."""
    plan, stepper = entrant.plan, entrant.stepper
    begun, last_step, written = rows.begun, plan.train.last_step, time.monotonic()
    yield Progress(begun, last_step, "first step" if begun == 0 else f"first step after {begun}")
    try:
        for number, batch in enumerate(islice(entrant.start.batches(), last_step - begun), start=begun + 1):
            rows.take_step(stepper, batch, monitor if _is_due(number, plan.monitor.every) else None)
            is_last = number == last_step
            if _is_due(number, plan.eval.every) and not is_last:  # the caller evaluates the last one
                record_evaluation(entrant.setup, entrant.recorder, number, stepper.backend)
            every = plan.train.checkpoint_every
            saves = every is not None and (is_last or _is_due(number, every))
            if saves or is_last or time.monotonic() - written > WRITE_EVERY_S:
                rows.write()
                if saves:
                    _save(entrant, rows, number)
                written = time.monotonic()
                row = rows.written[-1]
                warmup = "  warm-up" if row["warmup"] else ""
                shown = f"{number}/{last_step}  loss {row['loss']:.4f}  {short(row['step_ms'])} ms/step{warmup}"
                yield Progress(number, last_step, shown)
    finally:
        rows.write()


def _save(entrant: Entrant, rows: Rows, step: int) -> None:
    """Saves the moves of the weights, if anybody looks at them, and then a checkpoint of the first ``step`` steps, of
    which the rows are written. Raises InputError where the run's folder cannot be written."""
    start, setup = entrant.start, entrant.setup
    if rows.digest is not None:
        entrant.recorder.moves(asdict(start.before.with_moves(rows.digest.moves())))
    trained = what_is_trained(entrant.plan, setup)
    checkpoint = checkpoint_of(entrant.stepper.backend, step, _updates(start, rows), trained, setup.device)
    save(entrant.recorder.folder / CHECKPOINTS, checkpoint)


def _updates(start: Start, rows: Rows) -> int:
    """Returns the number of updates up to the last row that is written: the stepper's rates need not know it
    (``Rates.updates``)."""
    before = 0 if start.checkpoint is None else start.checkpoint.updates
    return before + sum(not row["skipped"] for row in rows.written)


def _is_due(step: int, every: int | None) -> bool:
    """Returns whether a step, counted from 1, is the last of ``every`` steps. None: no step is."""
    return every is not None and step % every == 0
