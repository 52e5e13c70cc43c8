"""Known mistakes of Adam and AdamW: each a replay that differs from theirs in one thing."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mpcompare.tasks.optimizers import Adam, AdamReplay, AdamW
from mpcompare.verdict.examine.updates import Mistake, Update, by

POWERS_OF_TWO = (0.25, 0.5, 2.0, 4.0)  # by which gradients are multiplied by mistake


def adam_mistakes(optimizer: Adam | AdamW) -> Iterator[tuple[str, Mistake]]:
    """Yields the mistakes that only Adam and AdamW know, each with its name."""
    decoupled = isinstance(optimizer, AdamW)
    never = math.inf  # the number of updates after which nothing is corrected
    counts: dict[str, Callable[[int, Update], tuple[float, float]]] = {
        "no bias correction": lambda t, update: (never, never),
        "no bias correction of m": lambda t, update: (never, t),
        "no bias correction of v": lambda t, update: (t, never),
        "bias correction of the first update": lambda t, update: (1, 1),
        "bias correction counts skipped steps": lambda t, update: (update.steps + 1,) * 2,
        "bias correction counts updates without a gradient": lambda t, update: (update.number + 1,) * 2,
        "bias correction one update ahead": lambda t, update: (t + 1, t + 1),
    }
    yield "divided by a rate of 0", by(DividedByTheRate(optimizer, decoupled))
    yield "eps inside the root", by(EpsInside(optimizer, decoupled))
    yield "eps 0", by(NoEps(optimizer, decoupled))
    yield "eps before the correction", by(EpsBefore(optimizer, decoupled))
    yield from ((name, _counting(Counts(optimizer, decoupled, count))) for name, count in counts.items())
    yield "bias correction the wrong way round", by(Multiplied(optimizer, decoupled))
    yield "mean corrected in place", by(CorrectedInPlace(optimizer, decoupled))
    yield "betas swapped", by(replace(optimizer, betas=optimizer.betas[::-1]).replay())
    beta1, beta2 = optimizer.betas
    for m, v in ((0, 0), (0, 1), (1, 0)):  # whether each is kept
        yield "moments of this gradient", by(Forgets(optimizer, decoupled, (m, m, v, v)))
        yield "moments of this gradient", by(replace(optimizer, betas=(m * beta1, v * beta2)).replay())
    for power in POWERS_OF_TWO:
        yield "gradients times a power of two", by(optimizer.replay(), grad_of=partial(_times, power))


def _times(factor: float, grad: Tensor, update: Update) -> Tensor:
    return factor * grad


def _counting(replay: "Counts") -> Mistake:
    plain = by(replay)

    def mistake(name: str, update: Update) -> tuple[Tensor, Tensor]:
        replay.update = update
        return plain(name, update)

    return mistake


class DividedByTheRate(AdamReplay):
    """``m / (sqrt(v) / lr + eps / lr)``, as torch's compiled AdamW has it with a rate that is a tensor. A rate of 0
    makes NaN of it where v is 0, and 0 elsewhere."""

    def step(self, name: str, grad: Tensor, weight: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        change, magnitude = super().step(name, grad, weight, lr)
        v = self.means[name][2]
        return (change if lr else change.masked_fill(v == 0, math.nan)), magnitude


class EpsInside(AdamReplay):
    """``sqrt(v + eps)``."""

    def denominator(self, v: Tensor, c2: float) -> Tensor:
        return (v + self.optimizer.eps).sqrt()


class NoEps(AdamReplay):
    """As where fp16 holds eps: 1e-8 is 0 there."""

    def denominator(self, v: Tensor, c2: float) -> Tensor:
        return v.sqrt()


class EpsBefore(AdamReplay):
    """``(sqrt(v) + eps) / sqrt(c2)``, with v as it is kept."""

    def denominator(self, v: Tensor, c2: float) -> Tensor:
        return v.sqrt() + self.optimizer.eps / c2**0.5


class Counts(AdamReplay):
    """The corrections of m and of v are those of other updates.

    Attributes:
        update: this one, set from outside.
    """

    update: Update

    def __init__(
        self, optimizer: Adam | AdamW, decoupled: bool, count: Callable[[int, Update], tuple[float, float]]
    ) -> None:
        """``count`` makes the two numbers of updates of the right one and of this update."""
        super().__init__(optimizer, decoupled)
        self.count = count

    def corrections(self, t: int) -> tuple[float, float]:
        of_m, of_v = (1 - beta**n for beta, n in zip(self.optimizer.betas, self.count(t, self.update), strict=True))
        return of_m, of_v


class Multiplied(AdamReplay):
    """Both means are multiplied by what should divide them."""

    def corrections(self, t: int) -> tuple[float, float]:
        c1, c2 = super().corrections(t)
        return 1 / c1, 1 / c2


class CorrectedInPlace(AdamReplay):
    """The mean of the gradients is kept as it was corrected, and corrected again in the next update."""

    def step(self, name: str, grad: Tensor, weight: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        update = super().step(name, grad, weight, lr)
        (m, M, *rest), (c1, _) = self.means[name], self.corrections(self.updates[name])
        self.means[name] = torch.stack((m / c1, M / c1, *rest))
        return update


class Forgets(AdamReplay):
    """Means are 0 again before each update."""

    def __init__(self, optimizer: Adam | AdamW, decoupled: bool, kept: tuple[int, ...]) -> None:
        """``kept`` is 0 for each of the means that is forgotten, else 1."""
        super().__init__(optimizer, decoupled)
        self.factors = kept

    def step(self, name: str, grad: Tensor, weight: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        if name in self.means:
            self.means[name] = torch.stack([f * mean for f, mean in zip(self.factors, self.means[name], strict=False)])
        return super().step(name, grad, weight, lr)
