"""A timed block beside the same one of the backend that was trained and examined, and was never loaded."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import chain, islice

import torch
from torch import Tensor

from mpcompare.contract import State, Stepper
from mpcompare.entrant.sample import Kinds, Sample
from mpcompare.entrant.setup import Setup
from mpcompare.verdict.examine import numerics


@dataclass(frozen=True)
class Ended:
    """The end of a block.

    Attributes:
        seeds: those of its batches: of the steps before the clock started, and of those after it.
        losses: of its first step, which is not timed, and of its last.
        sample: the elements that were looked at.
        left: their values, by kind.
    """

    seeds: tuple[int, int]
    losses: tuple[float, float]
    sample: Sample
    left: Kinds


@dataclass(frozen=True)
class StateDistance:
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
        timed_state: the distance of each kind, as :class:`StateDistance`.
        timed_steps: the number of steps of the block, those before the clock started included.
    """

    timed_loss: float
    timed_loss_difference: float
    timed_state: dict[str, dict[str, float]]
    timed_steps: int


def beside(setup: Setup, trained: Stepper, state: State, ended: Ended, steps: tuple[int, int]) -> Beside:
    """Lets the trained backend take a block that was timed, and returns how far apart the two are.

    Args:
        trained: is in ``state``, at the learning rate with which the block began.
        steps: the numbers of steps of the block before the clock started, and after it.
    """
    torch.manual_seed(ended.seeds[0])
    streams = (islice(setup.drawn_batches(seed), number) for seed, number in zip(ended.seeds, steps, strict=True))
    start = ended.sample.of_state(state)
    losses = [float(trained.step(batch)) for batch in chain.from_iterable(streams)]
    expected = ended.sample.of(trained.backend, trained.backend.master_params())
    first, last = (abs(mine - its) for mine, its in zip(ended.losses, (losses[0], losses[-1]), strict=True))
    return Beside(
        timed_loss=losses[-1],
        timed_loss_difference=max(first, last) if not math.isnan(first + last) else math.nan,
        timed_state={
            kind: asdict(_apart(start.get(kind, {}), tensors, ended.left.get(kind, {})))
            for kind, tensors in expected.items()
        },
        timed_steps=sum(steps),
    )


def _apart(before: Mapping[str, Tensor], expected: Mapping[str, Tensor], left: Mapping[str, Tensor]) -> StateDistance:
    """Returns the distances of one kind; a tensor that is missing is one of zeros."""
    zeros = {name: torch.zeros_like(t) for name, t in expected.items()}
    norm = numerics.distance(expected, zeros)
    return StateDistance(
        numerics.distance(expected, {**zeros, **left}), numerics.distance(expected, {**zeros, **before}), norm
    )
