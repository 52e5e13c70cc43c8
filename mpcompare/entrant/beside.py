"""A timed block beside the same one of the backend that was trained and examined, and was never loaded."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from mpcompare.contract import State, Stepper
from mpcompare.entrant.setup import Setup
from mpcompare.tasks.task import Params
from mpcompare.verdict.examine import numerics


@dataclass(frozen=True)
class Ended:
    """The end of a block.

    Attributes:
        seed: that of its batches.
        losses: of its first step, which is not timed, and of its last.
        left: the state that it left, by kind (:func:`kinds_of`).
    """

    seed: int
    losses: tuple[float, float]
    left: dict[str, Params]


@dataclass(frozen=True)
class Apart:
    """The distance between two ends of one block, of tensors of one kind together.

    Attributes:
        difference: between what the timed backend and the trained one left.
        moved: between the start and the end of the block, of the trained one.
        norm: of what that one left.
    """

    difference: float
    moved: float
    norm: float


@dataclass(frozen=True)
class Beside:
    """The part of ``result.json`` that holds a timed block beside the trained backend's.

    Attributes:
        timed_loss: the trained backend's loss in the last step.
        timed_loss_difference: the larger of the differences in the first step and in the last.
        timed_state: the distance of each kind, as :class:`Apart`.
        timed_steps: the number of steps of the block, those before the clock started included.
    """

    timed_loss: float
    timed_loss_difference: float
    timed_state: dict[str, dict[str, float]]
    timed_steps: int


def kinds_of(backend: Any) -> dict[str, Params]:
    """Returns copies of all that a backend has learned: its weights, its floating buffers, the optimizer's tensors."""
    kinds = {"weights": backend.master_params(), "buffers": backend.buffers(), **backend.state_dict()["optimizer"]}
    return {kind: copied for kind, tensors in kinds.items() if (copied := _floating(tensors))}


def beside(setup: Setup, trained: Stepper, state: State, ended: Ended, steps: int) -> Beside:
    """Lets the trained backend take a block that was timed, and returns how far apart the two are.

    Args:
        trained: is in ``state``, at the learning rate with which the block began.
        steps: the number of steps of the block, those before the clock started included.
    """
    torch.manual_seed(ended.seed)
    stream = setup.drawn_batches(ended.seed)
    losses = [float(trained.step(next(stream))) for _ in range(steps)]
    before = {"weights": state["params"], "buffers": state["buffers"], **state["optimizer"]}
    expected = kinds_of(trained.backend)
    first, last = (abs(mine - its) for mine, its in zip(ended.losses, (losses[0], losses[-1]), strict=True))
    return Beside(
        timed_loss=losses[-1],
        timed_loss_difference=max(first, last) if not math.isnan(first + last) else math.nan,
        timed_state={
            kind: asdict(_apart(before.get(kind, {}), tensors, ended.left.get(kind, {})))
            for kind, tensors in expected.items()
        },
        timed_steps=steps,
    )


def _apart(before: Mapping[str, Tensor], expected: Params, left: Mapping[str, Tensor]) -> Apart:
    """Returns the distances of one kind; a tensor that is missing is one of zeros."""
    zeros = {name: torch.zeros_like(t) for name, t in expected.items()}
    norm = numerics.distance(expected, zeros)
    return Apart(numerics.distance(expected, {**zeros, **left}), numerics.distance(expected, {**zeros, **before}), norm)


def _floating(tensors: Mapping[str, Tensor]) -> Params:
    return {name: t.detach().clone() for name, t in tensors.items() if t.is_floating_point()}
