"""The steps of an examination: how they begin, what is seen of them, and the step that they are compared with.

That is the oracle's, or the step of a new backend at the same weights and loss scale. Both backends round alike, so
their steps are equal but for the order of sums, unless one computes with anything else than its weights and its batch.
"""

import copy
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from mpcompare.contract import Batches, State, Walk
from mpcompare.stored import Stored
from mpcompare.tasks.draws import EXAMINED, seed_step
from mpcompare.tasks.task import Params
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.errors import gradient_errors, micro_batches
from mpcompare.verdict.examine.oracle import Exact
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.judge.drive import Gradients


def new_step(subject: Subject, network: nn.Module, scale: float, batch: Batches, lr: float) -> Exact:
    """Returns loss, gradients, and buffers after the step, of a new backend that is freed then.

    Args:
        network: has the weights and buffers with which the step begins.
        scale: the loss scale.
    """
    new = subject.make_backend(network, subject.scaling.starting_at(scale))
    walk = Walk(new, batch, lr)
    loss, grads = gradients_of(walk)
    kept = Stored(grads)
    if new.buffers():
        walk.finish()
    return Exact(loss, kept, dict(Stored(new.buffers())))


def starts_anew(backend: Any, params: Params, buffers: Params) -> State:
    """Returns the state from which a used backend begins anew: with these weights and buffers, a loss scale of 1, and
    nothing in its optimizer. All else is a copy of what it has now."""
    given: dict[str, Any] = {"params": params, "buffers": buffers, "optimizer": {}}
    own = copy.deepcopy({kind: kept for kind, kept in backend.state_dict().items() if kind not in given})
    if "scale" in own["loss_scale"]:
        own["loss_scale"]["scale"] = 1.0
    return cast(State, {**own, **given})


def begun(
    subject: Subject, backend: Any, number: int = EXAMINED, through: str = "unscale", batch: Batches | None = None
) -> Walk:
    """Begins the first step with the random numbers of the training step ``number``, and takes it through a phase;
    returns what takes the rest. Its ``batch`` may be another one than the first."""
    walk = Walk(backend, batch or subject.first_batch, subject.first_lr)
    seed_step(number)
    walk.through(through)
    return walk


def gradients_of(walk: Walk, kept: bool = False) -> tuple[float, Params]:
    """Returns loss and gradients of a step that is taken as far as they can be seen; it begins with the random numbers
    of every examined step.

    Args:
        kept: whether the gradients are needed after they are clipped; then they are copies, as they lie in memory.
    """
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
