"""The pass ``last``: the trained backend's next step, beside that of a new backend with the same weights, and its
update beside the optimizer's from the same state."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from mpcompare.contract import Batches, Stepper, Walk, promises_of
from mpcompare.stored import Stored
from mpcompare.tasks.task import params_of
from mpcompare.verdict.examine.attempts import Attempts
from mpcompare.verdict.examine.buffers import step_errors
from mpcompare.verdict.examine.drive import beside
from mpcompare.verdict.examine.forced.passes import layers_of, recorded_layers
from mpcompare.verdict.examine.forced.step import Recorded
from mpcompare.verdict.examine.idle import idle, moved
from mpcompare.verdict.examine.oracle import Exact
from mpcompare.verdict.examine.subject import Subject, at_scale, promised_task
from mpcompare.verdict.examine.trained import gradients_of, start_of, trained_update
from mpcompare.verdict.findings import Errors, Gradients, Layers, TrainedUpdate


def last(
    subject: Subject,
    stepper: Stepper,
    rows: Sequence[Mapping[str, Any]],
    trained: nn.Module,
    batch: Batches,
    late: Attempts,
) -> tuple[Gradients, Errors, TrainedUpdate | None, Layers | None]:
    """Returns loss and gradients of the trained backend beside those of a new one at the same loss scale, its buffers
    after the step likewise, its update, and the step layer by layer.

    Both round alike, so they are equal but for the order of sums, unless the trained one computes with anything else
    than its weights. Beside the oracle a unit next to 0 could make up for all of the error.

    Args:
        stepper: the backend as training left it; it takes a step, whatever stops here: timed steps are compared with
            its next ones.
        rows: those of ``steps.csv``.
        trained: the network with its weights and buffers.
        batch: of the step.
        late: takes the replay of the layers.
    """
    backend, lr = stepper.backend, float(stepper.rates.now)
    new = subject.make_backend(trained, at_scale(subject.scaling, float(backend.loss_scale())))
    before = 0 if subject.start is None else subject.start.updates
    start = start_of(backend, lr, before + sum(not row["skipped"] for row in rows), rows[-1]["step"])
    scale, walk, new_walk = float(backend.loss_scale()), Walk(backend, batch, lr), Walk(new, batch, lr)
    try:
        with recorded_layers(backend, batch) as record:
            clips = promised_task(subject.task, promises_of(backend)).clip_norm is not None
            loss, grads = gradients_of(walk, kept=clips)
        gradients = beside(loss, grads, Exact(*gradients_of(new_walk), {}, 0.0))
        if new.buffers():
            new_walk.finish()
        new_buffers = Stored(new.buffers())
        del new, new_walk  # before the replays
        step = Recorded(record, trained, subject.task.loss_fn, batch, loss, grads, scale, Stored(backend.buffers()))
        layers = late.take("layers after training", lambda: layers_of(subject, backend, step, walk.in_one_piece), None)
        weights = params_of(trained)
        without = idle(trained, subject.task.loss_fn, batch, grads, weights)
        update = trained_update(subject, walk, start, grads, without)
        if update and without:
            found = moved(without, weights, Stored(backend.master_params()))
            update = replace(update, drive=replace(update.drive, idle=[found]))
        buffers = step_errors(backend.buffers(), new_buffers) if new_buffers else {}
    finally:
        walk.finish()
    return gradients, buffers, update, layers
