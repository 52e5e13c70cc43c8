"""Of a backend with masks of its own: do its steps vary as the network's do?

- *Whose.* A backend that draws masks of its own.
- *Value.* Whether its loss depends on the masks. Its mean loss, and its mean gradient along the network's mean
  gradient.
- *Limit.* With other masks the loss changes, if the network's does by more than 4 standard deviations of its roundings.
  The means of backend and network differ as two samples of one distribution may, by Student's t for 1e-3.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpcompare.verdict.judge.check import Case, Check, Checks
from mpcompare.verdict.judge.limits import K, t_quantile

CAUSE = "dropout"


@dataclass(frozen=True)
class Masks:
    """The random numbers of a step, such as the masks of dropout, from one state of torch's generators."""

    training: bool  # whether it draws in training the same numbers as a plain call of the network with the same rows
    samples: "MaskSamples | None" = None  # None where it draws the same numbers in training, or the pass stopped


@dataclass(frozen=True)
class MaskSamples:
    """The first step with other random numbers each time."""

    # losses, exact_losses: the losses of the backend, and of a plain call of the network in fp32
    losses: list[float]
    exact_losses: list[float]
    # slopes, exact_slopes: the number that times a mean gradient is closest to all gradients of such a step; empty for
    # a backend that shows no gradients, or only clipped ones
    slopes: list[float]
    exact_slopes: list[float]


def checks(case: Case) -> Checks:
    """Yields checks of a backend that draws other random numbers in training than the network does."""
    masks = case.run.findings.masks
    samples = masks.samples if masks else None
    if samples is None:
        return
    own, exact = samples.losses, samples.exact_losses
    first = case.run.findings.first.finite
    if first and float(np.std(exact)) > 4 * first.loss_noise:
        because = f"the loss of the first step is {own[0]:.9g} whatever the random numbers are: dropout left off, or "
        same = float(len(set(own)) == 1)
        yield Check("masks vary from step to step", same, 0, CAUSE, because + "the same masks in every step")
    yield from _means("loss", own, exact)
    yield from _means("gradient along the mean gradient", samples.slopes, samples.exact_slopes)


def _means(what: str, own: Sequence[float], exact: Sequence[float]) -> Checks:
    """Two samples of one distribution exceed this limit, without K, in a share RARE of all cases. A few samples may
    overflow, but not all of them."""
    if not own or not np.isfinite(exact).all():
        return
    finite = [value for value in own if math.isfinite(value)]
    mean, expected = float(np.mean(finite or own)), float(np.mean(exact))
    number = max(len(finite), 1)
    limit = K * t_quantile(len(exact) - 1) * float(np.std(exact, ddof=1)) * math.sqrt(1 / number + 1 / len(exact))
    because = f"with masks of its own the {what} is {mean:.5g} on average, and the network's is {expected:.5g}"
    yield Check(f"{what} with masks of its own", abs(mean - expected), limit, CAUSE, because)
