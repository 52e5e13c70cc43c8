"""The steps of an examination: how they begin, what is seen of them, and the step that they are compared with.

They are compared with the oracle's step, or with the step of a new backend at the same weights and loss scale. Both
backends round alike, so their steps are equal but for the order of sums, unless a backend computes with anything else
than its weights and its batch.
"""

import copy
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from mpcompare.contract import Batches, State, Walk
from mpcompare.precision import PRECISIONS
from mpcompare.stored import Stored
from mpcompare.tasks.draws import EXAMINED, seed_step
from mpcompare.tasks.task import Params, buffers_of, params_of
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.errors import gradient_errors, micro_batches
from mpcompare.verdict.examine.oracle import Exact, oracle
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.judge.drive import Gradients
from mpcompare.verdict.judge.dtypes import shows_no_other
from mpcompare.verdict.judge.errors import Errors, relative_error
from mpcompare.verdict.judge.replayed import Layers

TRIED = ("fp32", "fp16", "bf16")  # the precisions that gradients may show, whatever was asked for


def new_step(subject: Subject, network: nn.Module, scale: float, batch: Batches, lr: float) -> Exact:
    """Returns loss, gradients, and buffers after the step of a new backend, from the weights and buffers of the network
    and a loss ``scale``. The backend is freed."""
    new = subject.make_backend(network, subject.scaling.starting_at(scale))
    walk = Walk(new, batch, lr)
    loss, grads = gradients_of(walk)
    kept = Stored(grads)
    if new.buffers():
        walk.finish()
    return Exact(loss, kept, dict(Stored(new.buffers())))


def starts_anew(backend: Any, network: nn.Module, scale: float = 1.0) -> State:
    """Returns the state from which a used backend begins anew: the weights and buffers of a network, a loss ``scale``,
    and nothing in its optimizer. All else is a copy of what the backend has now."""
    given: dict[str, Any] = {"params": params_of(network), "buffers": buffers_of(network), "optimizer": {}}
    own = copy.deepcopy({kind: kept for kind, kept in backend.state_dict().items() if kind not in given})
    if "scale" in own["loss_scale"]:
        own["loss_scale"]["scale"] = scale
    return cast(State, {**own, **given})


def begun(
    subject: Subject, backend: Any, number: int = EXAMINED, through: str = "unscale", batch: Batches | None = None
) -> Walk:
    """Begins the first step with the random numbers of the training step ``number``, takes it through a phase, and
    returns the walk that takes the rest. Its ``batch`` may be another batch than the first."""
    walk = Walk(backend, batch or subject.first_batch, subject.first_lr)
    seed_step(number)
    walk.through(through)
    return walk


def gradients_of(walk: Walk, kept: bool = False) -> tuple[float, Params]:
    """Returns loss and gradients of a step, which is taken as far as they can be seen. The step begins with the random
    numbers of every examined step. If the gradients are ``kept`` after they are clipped, they are copies in the same
    layout."""
    seed_step(EXAMINED)
    walk.through("unscale")
    grads = {name: g.detach() for name, g in walk.backend.grads().items()}
    return float(walk.loss), {name: g.clone() for name, g in grads.items()} if kept else grads


def compared(loss: float, grads: Mapping[str, Tensor], exact: Exact) -> Gradients:
    """Returns loss and gradients compared with the oracle's; ``grads`` is empty where none are shown."""
    of_batches = {name: g for name, g in grads.items() if any(name in share for share in exact.shares)}
    sketches = numerics.sketch(of_batches)
    return Gradients(
        loss=loss,
        exact_loss=exact.loss,
        loss_noise=exact.loss_noise,
        gradients=gradient_errors(grads, exact.grads) if grads else {},
        micro_batches=micro_batches(sketches, exact.shares, exact.weights) if sketches else None,
        of_tensors={name: micro_batches({name: s}, exact.shares, exact.weights) for name, s in sketches.items()},
    )


def effective_precision(subject: Subject, grads: Mapping[str, Tensor], errors: Errors, replay: Layers | None) -> str:
    """Returns the precision asked for, unless another precision's oracle is far closer, and every tensor is closer to
    that oracle or within one rounding of it. A unit next to 0 that turns on or off may move any tensor below it.

    Args:
        errors: of the gradients, compared with the oracle of the precision asked for.
        replay: the same step, compared with its forced replay. It may show that no other precision need be tried.
    """
    asked = subject.precision
    error = _largest(errors)
    others = [name for name in TRIED if PRECISIONS[name].storage != asked.storage]
    is_shown = replay is not None and shows_no_other(asked.name, others, errors, replay.rounding, replay)
    if not asked.is_16_bit or error <= 2 * asked.unit_roundoff or is_shown:
        return asked.name  # other precisions need not be tried

    found = {}
    for other in (PRECISIONS[name] for name in others):
        there, u = gradient_errors(grads, oracle(subject.exact_values, other).grads), other.unit_roundoff
        each = all(relative_error(there[name]) <= max(relative_error(errors[name]), u) for name in errors)
        if each and _largest(there) < min(error / 4, 16 * u):
            found[other.name] = _largest(there)
    return min(found, key=found.__getitem__, default=asked.name)


def _largest(errors: Errors) -> float:
    """Returns the largest relative error of a tensor."""
    return max(map(relative_error, errors.values()))
