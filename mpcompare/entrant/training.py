"""The pass that trains, with every step recorded and checkpoints saved, and evaluates in the end."""

import time
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch

from mpcompare.checkpoints import CHECKPOINTS, Checkpoint, save
from mpcompare.contract import Stepper
from mpcompare.dtypes import torch_dtype
from mpcompare.entrant import generators
from mpcompare.entrant.evaluation import Evaluations
from mpcompare.entrant.going_on import Before
from mpcompare.entrant.monitor import Monitor
from mpcompare.entrant.plan import Training
from mpcompare.entrant.resume import what_is_trained
from mpcompare.entrant.rows import Rows
from mpcompare.entrant.setup import Stream
from mpcompare.entrant.state import Entrant, Pass, Trained
from mpcompare.fields import TrainingRecord
from mpcompare.instruments import meter
from mpcompare.precision import PRECISIONS
from mpcompare.race.orders import Progress
from mpcompare.records import RunRecorder
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.midway import Midway
from mpcompare.verdict.examine.moves import Digest

WRITE_EVERY_S = 0.1  # steps are written at least this often


@dataclass(frozen=True)
class Saver:
    """Saves checkpoints of a run into its folder, and before each the moves of the weights up to there.

    Attributes:
        train: says when a checkpoint is saved.
        what_is_trained: :func:`mpcompare.entrant.resume.what_is_trained` of the run.
        before: the steps that were recorded before this process began.
        digest: the moves of the others; None where nobody looks.
    """

    recorder: RunRecorder
    train: Training
    what_is_trained: Mapping[str, Any]
    device: torch.device
    before: Before
    digest: Digest | None

    def due(self, step: int) -> bool:
        """Returns whether a checkpoint is saved after this step, counted from 1; the last one has one in any case."""
        every = self.train.checkpoint_every
        return every is not None and (step % every == 0 or step == self.train.last_step)

    def save(self, stepper: Stepper, step: int) -> None:
        """Saves the state of ``stepper`` after its first ``step`` steps; waits for the device, and for the disk.

        Raises:
            InputError: the folder cannot be written.
        """
        if self.digest is not None:
            self.recorder.moves(asdict(self.before.with_moves(self.digest.moves())))
        checkpoint = checkpoint_of(stepper, step, self.what_is_trained, self.device)
        save(self.recorder.folder / CHECKPOINTS, checkpoint)


def checkpoint_of(stepper: Stepper, step: int, what_is_trained: Mapping[str, Any], device: torch.device) -> Checkpoint:
    """Returns everything that the steps after ``step`` depend on. Its tensors are the backend's own, which the next
    step changes."""
    return Checkpoint(
        state=stepper.backend.state_dict(),
        step=step,
        updates=int(stepper.rates.updates),
        position=step,  # a batch a step
        what_is_trained=what_is_trained,
        generators=generators.states(device),
    )


def take(entrant: Entrant) -> Pass[TrainingRecord]:
    """Needs ``setup`` and ``start``. Leaves ``stepper`` and ``trained``."""
    plan, setup, start, recorder = entrant.plan, entrant.setup, entrant.start, entrant.recorder
    rss_before = meter.rss_bytes() if meter.reset_peak_rss() else None
    stepper = start.new_stepper()
    if plan.verdict.enabled:
        stepper = Midway(stepper, setup.task.schedule, start.step, plan.train.last_step)
    entrant.stepper = stepper
    storage = PRECISIONS[setup.record.precision].storage
    digest = Digest(stepper.backend, torch_dtype(storage)) if plan.verdict.enabled else None
    rows = Rows(recorder, setup.clock, setup.task.clip_norm, plan.train.warmup_steps, start.step, plan.seed, digest)
    monitor = Monitor(setup.task, storage, setup.clock, plan.monitor.every)
    evaluations = Evaluations(setup, recorder, plan.eval.every)
    saver = Saver(entrant.recorder, plan.train, what_is_trained(plan, setup), setup.device, start.before, digest)
    yield from train(stepper, start.batches(), rows, plan.train.last_step, monitor, evaluations, saver)
    peak_rss = meter.peak_rss_bytes()  # before the last evaluation, which has activations of its own
    backend, steps = stepper.backend, [*start.before.rows, *rows.written]
    scores = evaluations.take(steps[-1]["step"], backend)
    entrant.trained = Trained(
        rows=steps,
        read=entrant.shared.aside(backend.state_dict()),
        updates=int(stepper.rates.updates),
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


def train(
    stepper: Stepper,
    stream: Stream,
    rows: Rows,
    last_step: int,
    monitor: Monitor | None = None,
    evaluations: Evaluations | None = None,
    saver: Saver | None = None,
) -> Generator[Progress, Any, None]:
    """Trains up to the step number ``last_step``. However it ends, the rows of all steps that were taken are on disk.

    Args:
        monitor: takes the steps that are due to be looked into.
        evaluations: evaluates after steps, the last one excluded, which is its caller's.
        saver: saves checkpoints, of each of which all rows are on disk before; its time is in no step's.
    """
    begun, written = rows.begun, time.monotonic()
    yield Progress(begun, last_step, "first step" if begun == 0 else f"first step after {begun}")
    try:
        for number, batch in enumerate(islice(stream, last_step - begun), start=begun + 1):
            rows.take_step(stepper, batch, monitor if monitor and _is_due(number, monitor.every) else None)
            if evaluations and _is_due(number, evaluations.every) and number < last_step:
                evaluations.take(number, stepper.backend)
            saves = saver is not None and saver.due(number)
            if saves or time.monotonic() - written > WRITE_EVERY_S or number == last_step:
                rows.write()
                if saver is not None and saves:
                    saver.save(stepper, number)
                written = time.monotonic()
                yield _progress(rows.written[-1], last_step)
    finally:
        rows.write()


def _is_due(step: int, every: int | None) -> bool:
    """Returns whether a step, counted from 1, is one of every so many; none is where that is None."""
    return every is not None and step % every == 0


def _progress(row: dict[str, Any], last_step: int) -> Progress:
    number, warmup = row["step"], "  warm-up" if row["warmup"] else ""
    text = f"{number}/{last_step}  loss {row['loss']:.4f}  {row['step_ms']:.4g} ms/step{warmup}"
    return Progress(number, last_step, text)
