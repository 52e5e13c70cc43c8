"""The updates that an optimizer makes of the gradients of a step: the right one, or another one."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mpcompare.tasks.optimizers import UpdateReplay
from mpcompare.verdict.examine.seen import Seen

Mistake = Callable[[str, Seen], tuple[Tensor, Tensor]]  # change and magnitude, as ``Replay.step`` returns them


class Known(NamedTuple):
    """A known mistake: its cause, the words for its updates, which go on after "made", and a maker of these updates."""

    cause: str
    made: str
    updates: Mistake


def by(
    replay: UpdateReplay,
    rate: Callable[[Seen], float] | None = None,
    unclipped: bool = False,
    grad_of: Callable[[Tensor, Tensor, Seen], Tensor] | None = None,
    weight_dtype: torch.dtype | None = None,
) -> Mistake:
    """Returns the updates of a replay. It may see another rate, other gradients, or other weights than the step had.

    Args:
        grad_of: makes a gradient from the right gradient, the weight, and the update.
    """

    def mistake(name: str, update: Seen) -> tuple[Tensor, Tensor]:
        g, w = (update.grads if unclipped else update.clipped)[name].double(), update.before[name]
        w = (w.to(weight_dtype) if weight_dtype else w).double()
        if grad_of:
            g = grad_of(g, w, update)
        kept = update.remembered.of(name)
        if kept or update.remembered.updates:
            loaded = {kind: tensor.double() for kind, tensor in kept.items()}
            replay.remember(name, loaded, update.remembered.updates, update.remembered.at_once)
        return replay.step(name, g, w, rate(update) if rate else update.lr)

    return mistake
