"""The examination of a backend: it is driven where its errors show, and what it does is written down as numbers.

Each pass is a file here. The findings of a pass stand even if a later pass stops with an error. verdict/judge says what
the numbers mean. All passes speak of the same things:

subject     what is examined: a maker of backends, the network and the task
stepper     the backend that training left, with its next learning rate
trained     the network with the weights and buffers that training left
batch       the batch that follows the last one of training
rows        the rows of ``steps.csv``, a training step each
attempts    takes the passes, each of which may stop with an error; has what they found
"""

import math
from collections.abc import Generator
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from typing import Any

from mpcompare.contract import Stepper
from mpcompare.precision import Precision
from mpcompare.race.orders import Progress
from mpcompare.verdict.examine.aged import age_of, aged
from mpcompare.verdict.examine.attempts import Attempts
from mpcompare.verdict.examine.buffers import buffers_of_backend
from mpcompare.verdict.examine.drive import Driver
from mpcompare.verdict.examine.exact_values import Problem
from mpcompare.verdict.examine.forced.passes import layers_of_first_step
from mpcompare.verdict.examine.last import exponents_of, last
from mpcompare.verdict.examine.layers import layers
from mpcompare.verdict.examine.lent import written
from mpcompare.verdict.examine.loss_scale import StepRows, first_wrong_scale
from mpcompare.verdict.examine.masks import masks_of
from mpcompare.verdict.examine.midway import midway
from mpcompare.verdict.examine.noise import noise_runs
from mpcompare.verdict.examine.overflow import infinite_input, overflow
from mpcompare.verdict.examine.resume import resume
from mpcompare.verdict.examine.rounding import rounding_errors
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.findings import Findings, Recipe
from mpcompare.verdict.judge.drive import Gradients
from mpcompare.verdict.judge.errors import RoundingError, RoundingErrors
from mpcompare.verdict.judge.kinds import ORDER
from mpcompare.verdict.judge.masks import Masks
from mpcompare.verdict.judge.moves import Moves
from mpcompare.verdict.judge.replayed import Layers


def examine(
    subject: Subject,
    stepper: Stepper,
    rows: StepRows,
    moved: dict[str, list[float]],
    noise: int,
    moves: Moves | None = None,
) -> Generator[Progress, Any, Findings]:
    """Takes all passes, one after the other.

    Args:
        moved: the change of each parameter over training, as ``numerics.sketch``.
        noise: the number of runs that find the noise; 0 for a backend that others are not compared with.
        moves: how far each training step moved the weights; None where nobody looked.
    """
    attempts, rule = Attempts(), subject.rule_of(stepper.backend)
    yield Progress(0, 1, "each layer")
    order, few = subject.exact.order, subject.first_batch[0][0][:4]  # before a backend has tensors
    of_tensors, longest_sum = layers(subject.network(), order, few, subject.task.batch_size)
    start = attempts.take("layers", layers_of_first_step, subject)
    sharp = start and attempts.take("sharp", layers_of_first_step, subject, True)
    yield Progress(0, 1, "gradients of the first step")
    _at_the_start(subject, attempts, start)
    masks = attempts.take("masks", masks_of, subject, start is None or start.as_given)
    # A step whose masks nobody knows is compared with no step that may have others.
    attempts.found["masks"] = Masks(False) if "masks" in attempts.stopped else masks
    attempts.found["rounding"] = {} if start and start.loss_is_replayed else _rounding(subject)
    yield Progress(0, 1, "gradients after training")
    _at_the_end(subject, stepper, rows, attempts, counts=noise > 0)
    replays = {"first": start, "sharp": sharp, "last": attempts.found.pop("replay", None)}
    if subject.scaling.scales:
        yield Progress(0, 1, "overflow")
        attempts.find("overflow", overflow, subject)
    yield Progress(0, 1, "a backend that is loaded")
    attempts.find("resume", resume, subject)
    with attempts.at("noise"):
        attempts.found["noise"] = yield from noise_runs(subject, rows, noise)
    task, optimizer = rule.task, rule.task.optimizer
    clips = task.clip_norm, task.clip_norm_type
    own_loss = task.loss == "model" or not isinstance(task.loss, str)
    return Findings(
        precision=subject.precision.name,
        recipe=Recipe(task.batch_size, task.accumulate, *clips, optimizer.linear, optimizer.bounded, own_loss),
        longest_sum=longest_sum,
        layers=of_tensors,
        loss_scale=first_wrong_scale(subject.scaling_at_start(rule.promises), rows),
        moved=moved,
        moves=moves,
        replays={name: layers for name, layers in replays.items() if layers},
        promises=rule.promises,
        lent=written(subject, attempts),
        stopped=attempts.stopped,
        hidden=attempts.hidden,
        **attempts.found,
    )


def _at_the_start(subject: Subject, attempts: Attempts, replay: Layers | None) -> None:
    """Takes the passes of backends that have not trained; ``replay`` is the first step, layer by layer."""
    driver = _first(subject)
    age = attempts.take("aged", age_of, driver)
    attempts.found["first"] = driver.result(replay)
    attempts.found["infinite"] = attempts.take("infinite input", infinite_input, subject, driver)
    attempts.found["of_checks"] = _of_checks(subject, driver, attempts)
    del driver  # frees its backend before the next backend is made
    if age:
        attempts.find("aged", aged, subject, *age)


def _first(subject: Subject) -> Driver:
    """Takes the first step, and as many more as show what else an update depends on; returns the driver.

    The second step shows another learning rate, and what the optimizer remembers. The third shows how many digits it
    remembers: a moment of one gradient has no more digits than the gradient. If the first step does not depend on every
    parameter, more batches may show the others.
    """
    task, batches = subject.task, subject.first_batches
    follow = batches[1:3] if task.optimizer.remembers else batches[1 : 1 + bool(task.schedule.length)]
    if any(p.requires_grad and name not in subject.exact.grads for name, p in subject.examined.named_parameters()):
        follow = batches[1:4]
    return Driver(subject, subject.scaling, with_oracle=True).through(follow)


def _of_checks(subject: Subject, driver: Driver, attempts: Attempts) -> dict[str, Any]:
    """Takes the passes of checks whose file here has one for the driver of the pass ``first``, and returns by check
    what they find."""
    files = {name: f"{__package__}.{name}" for name in ORDER if find_spec(f"{__package__}.{name}")}
    passes = {name: getattr(import_module(file), "after_first", None) for name, file in files.items()}
    found = {name: attempts.take(name, own, subject, driver) for name, own in passes.items() if own}
    return {name: each for name, each in found.items() if each is not None}


def _at_the_end(subject: Subject, stepper: Stepper, rows: StepRows, attempts: Attempts, counts: bool) -> None:
    """Looks at what training left, and takes the step that follows; ``counts`` is whether exponents are counted."""
    trained, batch = stepper.backend, next(islice(subject.batches(), rows[-1]["step"], None))
    network = subject.network(trained.master_params(), trained.buffers())
    attempts.found["buffers"] = attempts.take("buffers", buffers_of_backend, subject.model, trained) or {}
    attempts.find("held_out", subject.held_out_by, trained)
    nothing = {"last": Gradients(math.nan, math.nan, math.nan)}
    attempts.found |= attempts.take("last", last, subject, stepper, rows, network, batch, attempts) or nothing
    attempts.find("midway", midway, subject, stepper)
    if counts:
        attempts.found["exponents"] = attempts.take("exponents", exponents_of, subject, network, batch) or {}


def _rounding(subject: Subject) -> RoundingErrors:
    """Returns what one rounding of each result does to the first step; all entrants of a race share it."""
    precision = subject.precision
    values = subject.exact_values.once(f"rounding-{precision.name}", _rounding_values, precision)
    return {name: RoundingError(**error) for name, error in values.items()}


def _rounding_values(problem: Problem, precision: Precision) -> dict[str, dict[str, float]]:
    errors = rounding_errors(problem.network, problem.loss_fn, problem.batch, precision)
    return {name: vars(error) for name, error in errors.items()}
