"""The pass ``last``: the trained backend's next step, compared with the step of a new backend at the same weights, and
its update, compared with the optimizer's from the same state.

The exponents of activations, gradients and updates are counted there, and in the first step. They tell what a format
would hold of these numbers.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.clipping import factor_of_norm
from mpcompare.contract import Batches, Stepper
from mpcompare.stored import Stored
from mpcompare.tasks.task import Params, Task, params_of
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.attempts import Attempts
from mpcompare.verdict.examine.errors import gradient_errors
from mpcompare.verdict.examine.forced.passes import layers_of, recorded_step, unrecorded
from mpcompare.verdict.examine.idle import idle, moved
from mpcompare.verdict.examine.loss_scale import StepRows
from mpcompare.verdict.examine.new_step import compared, new_step
from mpcompare.verdict.examine.oracle import exact_step
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.examine.trained import KeptStep, trained_update
from mpcompare.verdict.findings import Counts


def last(
    subject: Subject, stepper: Stepper, rows: StepRows, trained: nn.Module, batch: Batches, attempts: Attempts
) -> dict[str, Any]:
    """Returns, by the names of findings, loss and gradients of the trained backend compared with a new backend's, its
    buffers after the step likewise, and its update; and as ``replay`` the step layer by layer.

    The stepper's backend takes a step, whatever stops here: timed steps are compared with its next steps.
    """
    backend, lr = stepper.backend, float(stepper.rates.now)
    before = 0 if subject.start is None else subject.start.updates
    updates = before + sum(not row["skipped"] for row in rows)
    walk = KeptStep(backend, batch, lr, updates, rows[-1]["step"])
    try:
        rule = subject.rule_of(backend)
        with unrecorded(backend):
            new = new_step(subject, trained, walk.scale, batch, lr)
        step = recorded_step(subject, trained, walk, batch, kept=rule.task.clip_norm is not None)
        gradients, buffers = compared(step.loss, step.grads, new), new.buffers
        del new  # before the replays
        layers = attempts.take("layers after training", layers_of, subject, walk, step)
        step.record.calls.clear()  # the hooks in the graph of the loss, which the backend keeps, know the record
        weights = params_of(trained)
        without = idle(trained, subject.task.loss_fn, batch, step.grads, weights, {})
        update = trained_update(rule, walk, step.grads, without)
        if update and without:
            found = moved(without, weights, Stored(backend.master_params()))
            update = replace(update, drive=replace(update.drive, idle=[found]))
        of_buffers = gradient_errors(backend.buffers(), buffers) if buffers else {}
    finally:
        walk.finish()
    return {"last": gradients, "last_buffers": of_buffers, "trained": update, "replay": layers}


def exponents_of(subject: Subject, trained: nn.Module, batch: Batches) -> dict[str, Counts]:
    """Returns the counts of the first step (``first``) and of a step after training (``last``). The exponents of the
    latter are counted in fp32, which is exact enough."""
    last = exact_step(trained, subject.task.loss_fn, batch, subject.precision, count=True, dtype=torch.float32)
    return {
        "first": {
            **subject.exact.exponents,
            "updates": _updates(subject.task, params_of(subject.model), subject.exact.grads),
        },
        "last": {**last.exponents, "updates": _updates(subject.task, params_of(trained), last.grads)},
    }


def _updates(task: Task, params: Params, grads: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Returns ``numerics.exponents`` of ``|first update| / |w|`` from these gradients, by parameter. They are clipped
    as the task says. The learning rate is the optimizer's own, because a schedule may begin or end at 0."""
    optimizer, by_name = task.optimizer, {}
    factor = 1.0 if task.clip_norm is None else factor_of_norm(numerics.norm_of(grads), task.clip_norm)
    for name in grads:
        counts = []
        for w, g in numerics.chunks(params[name], grads[name]):
            w = w.double()
            update, _ = optimizer.replay().step(name, factor * g.double(), w, optimizer.lr)
            no_weight = w == 0
            count = numerics.exponents(update.div_(w).masked_fill_(no_weight, 0))
            count[0] -= int(no_weight.sum())
            counts.append(count)
        by_name[name] = torch.stack(counts).sum(dim=0).tolist()
    return by_name
