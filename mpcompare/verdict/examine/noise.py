"""The noise: the same backend trains again under changes that must not matter. Correct runs may be so far apart."""

from collections.abc import Generator
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn

from mpcompare.contract import State, Stepper
from mpcompare.dtypes import torch_dtype
from mpcompare.instruments import heap
from mpcompare.loss_scale import LossScale
from mpcompare.race.orders import Progress
from mpcompare.race.timetable import NOISE
from mpcompare.stored import Stored
from mpcompare.tasks.draws import seed_step, state
from mpcompare.tasks.losses import Loss
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.buffers import buffers_of_backend
from mpcompare.verdict.examine.loss_scale import StepRows
from mpcompare.verdict.examine.moves import Digest
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.examine.widened import widened
from mpcompare.verdict.judge.run import NoiseRun


def noise_runs(subject: Subject, rows: StepRows, noise: int) -> Generator[Progress, Any, list[NoiseRun]]:
    """Trains again, so many times."""
    runs: list[NoiseRun] = []
    for number in range(noise):
        yield Progress(number, noise, f"run {number + 1} of {noise}", NOISE)
        runs.append((yield from train_again(subject, rows, number, noise)))
    return runs


def train_again(subject: Subject, rows: StepRows, number: int, of: int) -> Generator[Progress, Any, NoiseRun]:
    """Trains once more, for as many steps.

    Weights are moved by less than the precision resolves, up to u |w|. The rows of each batch stand in another order if
    the loss does not depend on the order, so sums are taken in another order. The loss scale is another power of two,
    unless a step overflowed: then other steps would be skipped. Run ``number``, from 0, draws changes of its own.
    """
    task, begin = subject.task, subject.start
    generator = torch.Generator().manual_seed(number)
    start = _moved_weights(subject, generator)
    first_x, first_y = next(subject.batches())[0]
    order = torch.randperm(len(first_x), generator=generator).to(first_x.device)
    reorders = order_is_free(subject.network(), task.loss_fn, first_x, first_y)
    keeps_scale = any(row["skipped"] for row in rows)
    scaling = subject.scaling_at_start()
    if not keeps_scale:
        scaling = scaling.starting_at(scaling.scale / 2 ** (number + 1))
    heap.trim()
    stepper = _stepper(subject, start, scaling)
    losses, skipped, digest = [], [], Digest(stepper.backend, torch_dtype(subject.precision.storage))
    position = 0 if begin is None else begin.position
    for row, batch in zip(rows, islice(subject.batches(), position, position + len(rows)), strict=True):
        batch = [(x[order], y[order]) for x, y in batch] if reorders else batch
        seed_step(row["step"], subject.seed)  # the masks that training drew
        losses.append(float(stepper.step(batch)))
        skipped.append(bool(stepper.backend.skipped))
        digest.take()
        done = number * len(rows) + len(losses)
        yield Progress(done, of * len(rows), f"run {number + 1} of {of}, step {len(losses)}/{len(rows)}", NOISE)
    changes = ["weights moved by less than they are rounded"]
    changes += ["rows in another order"] if reorders else []
    changes += [] if keeps_scale or not scaling.scales else [f"loss scale {scaling.scale:g}"]
    moved = numerics.sketch_of_change(start, stepper.backend.master_params())
    buffers = buffers_of_backend(subject.model, stepper.backend)
    held_out = subject.held_out_by(stepper.backend)
    return NoiseRun(", ".join(changes), losses, skipped, moved, buffers, held_out, digest.moves())


def _moved_weights(subject: Subject, generator: torch.Generator) -> Stored:
    """Returns the weights at which training began, each times ``1 + e`` with e uniform in +- u."""
    u, moved = subject.precision.unit_roundoff, Stored()
    saved = subject.start.state["params"] if subject.start else {}
    for name, p in subject.model.named_parameters():
        weight = saved.get(name, p.detach()).to(p.device)
        factor = torch.rand(p.shape, generator=generator).mul_(2).sub_(1).mul_(u).add_(1)
        moved[name] = factor.to(p.device).mul_(weight)
    return moved


def _stepper(subject: Subject, start: Stored, scaling: LossScale) -> Stepper:
    """Returns a new backend with these weights at the beginning of training."""
    begin, backend = subject.start, subject.make_backend(subject.network(start), scaling)
    if begin is not None:
        scale = begin.state["loss_scale"]
        state = {**begin.state, "params": dict(start), "loss_scale": {**scale, "scale": scaling.scale} if scale else {}}
        backend.load_state_dict(cast(State, state))
    return Stepper(backend, subject.task.new_rates(begin.updates if begin else 0))


def order_is_free(network: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor) -> bool:
    """Returns whether a batch's first rows and the same rows in reverse have the same loss. A mean does not depend on
    their order, unless masks are drawn for the rows. The network is in float64 afterwards."""
    network = widened(network.double())
    x, y = x[:16], y[:16]
    x, y = (t.double() if t.is_floating_point() else t for t in (x, y))
    with torch.no_grad():
        before = state(x.device)
        a, b = loss_fn(network(x), y), loss_fn(network(x.flip(0)), y.flip(0))
    return state(x.device) == before and bool((a - b).abs() <= 1e-10 * a.abs())
