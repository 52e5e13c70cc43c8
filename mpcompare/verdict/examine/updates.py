"""Updates of single elements, and the updates that another optimizer makes of the same gradients."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mpcompare.tasks.optimizers import UpdateReplay
from mpcompare.tasks.task import Params
from mpcompare.verdict.examine.errors import Change

ELEMENTS = 4096  # of a large tensor, evenly spread: every update is one of single elements


@dataclass(frozen=True, kw_only=True)
class Update(Change):
    """An update: of each tensor at most ``ELEMENTS`` elements, in one row."""

    grads: Params  # before they were clipped; of a backend whose step is one piece, after
    norm: float  # the 2-norm of ``clipped``, all elements of all tensors together; NaN where none are shown
    number: int  # the number of updates that were taken before
    steps: int  # the number of steps before, the skipped ones among them
    scale: float = 1.0  # the loss scale of the step


def some_of(tensors: Mapping[str, Tensor]) -> Params:
    """Returns at most ``ELEMENTS`` of each tensor, copied."""
    return {name: t.flatten()[:: max(1, -(-t.numel() // ELEMENTS))].clone() for name, t in tensors.items()}


Mistake = Callable[[str, Update], tuple[Tensor, Tensor]]  # change and magnitude, as ``Replay.step`` returns them


class Known(NamedTuple):
    """A known mistake: its cause, how it makes updates, in words that go on after "made", and these updates."""

    cause: str
    made: str
    updates: Mistake


def by(
    replay: UpdateReplay,
    rate: Callable[[Update], float] | None = None,
    unclipped: bool = False,
    grad_of: Callable[[Tensor, Update], Tensor] | None = None,
    weight_dtype: torch.dtype | None = None,
) -> Mistake:
    """Returns the updates of a replay that sees another rate, other gradients, or other weights than the right one."""

    def mistake(name: str, update: Update) -> tuple[Tensor, Tensor]:
        g, w = (update.grads if unclipped else update.clipped)[name].double(), update.before[name]
        if grad_of:
            g = grad_of(g, update)
        if weight_dtype:
            w = w.to(weight_dtype)
        kept = update.remembered.of(name)
        if kept or update.remembered.updates:
            loaded = {kind: tensor.double() for kind, tensor in kept.items()}
            replay.remember(name, loaded, update.remembered.updates, update.remembered.at_once)
        return replay.step(name, g, w.double(), rate(update) if rate else update.lr)

    return mistake
