"""The pass ``last``: the trained backend's next step, beside that of a new backend with the same weights."""

from typing import Any

from torch import nn

from mpcompare.contract import Batches, Walk
from mpcompare.tasks.task import Params
from mpcompare.verdict.examine.drive import beside
from mpcompare.verdict.examine.oracle import Exact
from mpcompare.verdict.examine.subject import Subject, at_scale
from mpcompare.verdict.findings import Gradients


def last(subject: Subject, backend: Any, lr: float, trained: nn.Module, batch: Batches) -> Gradients:
    """Returns loss and gradients of the trained backend beside those of a new one at the same loss scale.

    Both round alike, so they are equal but for the order of sums, unless the trained one computes with anything else
    than its weights. Beside the oracle a unit next to 0 could make up for all of the error.

    Args:
        backend: as training left it; it takes a step.
        lr: the learning rate of that step.
        trained: the network with the weights and buffers of ``backend``.
        batch: of the step.
    """
    new = subject.make_backend(trained, at_scale(subject.scaling, float(backend.loss_scale())))
    walk = Walk(backend, batch, lr)
    loss, grads = _gradients(walk)
    walk.finish()
    new_loss, new_grads = _gradients(Walk(new, batch, lr))
    return beside(loss, grads, Exact(new_loss, new_grads, {}, 0.0))


def _gradients(walk: Walk) -> tuple[float, Params]:
    """Returns loss and gradients, copied as they lie in memory, of a step that is taken as far as they can be seen."""
    walk.through("unscale")
    return float(walk.loss), {name: g.detach().clone() for name, g in walk.backend.grads().items()}
