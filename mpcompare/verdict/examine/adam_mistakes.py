"""Known mistakes of Adam and AdamW: each is a replay that differs from the right replay in one thing."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpcompare.tasks.optimizers import Adam, AdamReplay, AdamW
from mpcompare.verdict.examine.seen import Known, Mistake, Seen, by

POWERS_OF_TWO = (0.25, 0.5, 2.0, 4.0)  # by which gradients are multiplied by mistake
EPS_BEFORE = "with eps added before the bias correction"  # the last form in section 2 of Adam's paper, and Keras's


def adam_mistakes(optimizer: Adam | AdamW) -> Iterator[Known]:
    """Yields the mistakes that only Adam and AdamW know."""
    made = "with a division by a learning rate of 0, which is NaN where v is 0"
    yield Known("optimizer", made, by(DividedByTheRate(optimizer)))
    inside = by(Otherwise(optimizer, denominator=lambda v, c2: (v + optimizer.eps).sqrt()))
    yield Known("eps", "with eps inside the root", inside)
    yield Known("eps", "with eps = 0, as fp16 has it", by(Otherwise(optimizer, denominator=lambda v, c2: v.sqrt())))
    yield Known("eps", EPS_BEFORE, by(eps_before(optimizer)))
    yield from (Known("bias correction", made, mistake) for made, mistake in _corrections(optimizer))
    beta1, beta2 = optimizer.betas
    yield Known("optimizer", "with its betas swapped", by(replace(optimizer, betas=(beta2, beta1)).replay()))
    made = "from this gradient alone: m or v, or both, forget the gradients before"
    for m, v in ((0, 0), (0, 1), (1, 0)):  # whether m is kept, and v
        yield Known("moments", made, by(Forgets((m, m, v, v), optimizer)))
        yield Known("moments", made, by(replace(optimizer, betas=(m * beta1, v * beta2)).replay()))
    for power in POWERS_OF_TWO:
        times = by(optimizer.replay(), grad_of=partial(_times, power))
        yield Known("gradient scaled", "from gradients that are multiplied by a power of two", times)


def _corrections(optimizer: Adam | AdamW) -> Iterator[tuple[str, Mistake]]:
    never = math.inf  # the number of updates after which nothing is corrected
    counts: dict[str, Callable[[int, Seen], tuple[float, float]]] = {
        "without bias correction": lambda t, update: (never, never),
        "without bias correction of m": lambda t, update: (never, t),
        "without bias correction of v": lambda t, update: (t, never),
        "with the bias correction of the first update": lambda t, update: (1, 1),
        "with a bias correction that counts skipped steps": lambda t, update: (update.steps + 1,) * 2,
        "with a bias correction that counts updates in which there is no gradient of it": (
            lambda t, update: (update.number + 1,) * 2
        ),
        "with the bias correction of the next update": lambda t, update: (t + 1, t + 1),
    }
    yield from ((made, _counting(optimizer, count)) for made, count in counts.items())
    reversed_ = Otherwise(optimizer, corrections=lambda t: tuple(1 / (1 - beta**t) for beta in optimizer.betas))
    yield "with both means multiplied by what should divide them", by(reversed_)
    made = "with a mean of the gradients that is corrected where it is kept, and corrected again in the next update"
    yield made, by(CorrectedInPlace(optimizer))


def _counting(optimizer: Adam | AdamW, count: Callable[[int, Seen], tuple[float, float]]) -> Mistake:
    """Corrects m and v as in other updates: ``count`` makes their numbers from the right number and the update."""
    now: list[Seen] = []

    def corrections(t: int) -> tuple[float, ...]:
        return tuple(1 - beta**n for beta, n in zip(optimizer.betas, count(t, now[-1]), strict=True))

    plain = by(Otherwise(optimizer, corrections=corrections))

    def mistake(name: str, update: Seen) -> tuple[Tensor, Tensor]:
        now[:] = [update]
        return plain(name, update)

    return mistake


def eps_before(optimizer: Adam | AdamW) -> AdamReplay:
    """Returns the replay with ``(sqrt(v) + eps) / sqrt(c2)``, with v as it is kept."""
    return Otherwise(optimizer, denominator=lambda v, c2: v.sqrt() + optimizer.eps / c2**0.5)


def _times(factor: float, grad: Tensor, weight: Tensor, update: Seen) -> Tensor:
    return factor * grad


class Otherwise(AdamReplay):
    """Adam with another denominator, or other corrections."""

    def __init__(self, optimizer: Adam | AdamW, **others: Any) -> None:
        super().__init__(optimizer)
        vars(self).update(others)


class DividedByTheRate(AdamReplay):
    """``m / (sqrt(v) / lr + eps / lr)``, as torch's compiled AdamW computes with a rate that is a tensor. With a rate
    of 0 this is NaN where v is 0, and 0 elsewhere."""

    def step(self, name: str, grad: Tensor, weight: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        change, magnitude = super().step(name, grad, weight, lr)
        v = self.means[name][2]
        return (change if lr else change.masked_fill(v == 0, math.nan)), magnitude


class CorrectedInPlace(AdamReplay):
    """The corrected mean of the gradients is kept, and corrected again in the next update."""

    def step(self, name: str, grad: Tensor, weight: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        update = super().step(name, grad, weight, lr)
        (m, M, *rest), (c1, _) = self.means[name], self.corrections(self.updates[name])
        self.means[name] = torch.stack((m / c1, M / c1, *rest))
        return update


class Forgets(AdamReplay):
    """Means are 0 again before each update."""

    def __init__(self, kept: tuple[int, ...], optimizer: Adam | AdamW) -> None:
        """``kept`` has 0 for each mean that is forgotten, else 1."""
        super().__init__(optimizer)
        self.factors = kept

    def step(self, name: str, grad: Tensor, weight: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        if name in self.means:
            self.means[name] = torch.stack([f * mean for f, mean in zip(self.factors, self.means[name], strict=False)])
        return super().step(name, grad, weight, lr)
