"""A backend that draws masks of its own: its steps vary from mask to mask as those of the network do."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from scipy import special

from mpcompare.verdict.judge.check import Case, Check
from mpcompare.verdict.judge.limits import RARE, K

CAUSE = "dropout"


def checks(case: Case) -> Iterator[Check]:
    """Yields checks of a backend whose random numbers in training are not those that the network draws.

    Its loss is another one with other masks, where the network's is by more than roundings could hide. Its losses and
    slopes are a small sample, and the network's are another; if both are of one distribution, the difference of their
    means is Student's t, as often as RARE beyond this limit without K.
    """
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


def _means(what: str, own: Sequence[float], exact: Sequence[float]) -> Iterator[Check]:
    if not own or not np.isfinite([*own, *exact]).all():
        return
    mean, expected = float(np.mean(own)), float(np.mean(exact))
    t = float(special.stdtrit(len(exact) - 1, 1 - RARE / 2))
    limit = K * t * float(np.std(exact, ddof=1)) * math.sqrt(1 / len(own) + 1 / len(exact))
    because = f"with masks of its own the {what} is {mean:.5g} on average, that of the network {expected:.5g}"
    yield Check(f"{what} with masks of its own", abs(mean - expected), limit, CAUSE, because)
