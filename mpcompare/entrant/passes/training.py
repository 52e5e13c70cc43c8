"""The pass that trains, with every step recorded, and evaluates in the end."""

from dataclasses import dataclass
from typing import Any

from mpcompare.dtypes import torch_dtype
from mpcompare.entrant.evaluation import Evaluations
from mpcompare.entrant.monitor import Monitor
from mpcompare.entrant.resume import what_is_trained
from mpcompare.entrant.rows import Rows
from mpcompare.entrant.saving import Saver
from mpcompare.entrant.state import Entrant, Pass
from mpcompare.entrant.training import Trained, train
from mpcompare.instruments import meter
from mpcompare.precision import PRECISIONS
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.midway import Midway
from mpcompare.verdict.examine.moves import Digest


@dataclass(frozen=True)
class TrainingPart:
    """A part of ``result.json``.

    Attributes:
        first_step_ms: milliseconds of the first step.
        skipped_steps: number of steps that updated nothing.
        final_loss, final_loss_scale: of the last step, and after it.
        engine: the answer of the trained backend to what computes its products.
        dtypes: observed in the last step.
        rss_before_bytes, peak_rss_bytes: resident set of the process before and at most during training; None where it
            is not known.
        test_loss, test_accuracy: on the held-out samples.
    """

    first_step_ms: float
    skipped_steps: int
    final_loss: float
    final_loss_scale: float
    engine: str
    dtypes: dict[str, str]
    rss_before_bytes: int | None
    peak_rss_bytes: int | None
    test_loss: float | None
    test_accuracy: float | None


def take(entrant: Entrant) -> Pass[TrainingPart]:
    """Needs ``setup`` and ``start``. Leaves ``stepper`` and ``trained``."""
    plan, setup, start, recorder = entrant.plan, entrant.setup, entrant.start, entrant.recorder
    rss_before = meter.rss_bytes() if meter.reset_peak_rss() else None
    stepper = start.new_stepper()
    if plan.verdict.enabled:
        stepper = Midway(stepper, setup.task.schedule, start.step, plan.train.last_step)
    entrant.stepper = stepper
    digest = Digest(stepper.backend, torch_dtype(PRECISIONS[setup.precision].storage)) if plan.verdict.enabled else None
    rows = Rows(recorder, setup.clock, setup.task.clip_norm, plan.train.warmup_steps, start.step, plan.seed, digest)
    monitor = Monitor(setup.task, PRECISIONS[setup.precision].storage, setup.clock, plan.monitor.every)
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
        moved=_moved(entrant),
        moves=start.before.with_moves(digest.moves()) if digest else None,
    )
    return TrainingPart(
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


def _moved(entrant: Entrant) -> dict[str, Any]:
    """Returns the sketch of how far training has moved each parameter."""
    before, after = entrant.start.params, entrant.stepper.backend.master_params()
    return numerics.sketch_of_change(before, after)
