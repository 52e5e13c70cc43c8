"""Each tensor of a backend that loaded the state of another goes on as the other's does."""

import math
from collections.abc import Iterator
from dataclasses import replace

from scipy import special

from mpcompare.verdict.judge.check import Check, Examined
from mpcompare.verdict.judge.limits import FP32, RARE, K, stored_coarsely, tensor_limit

PART = 8.0  # of u: gradients of two backends of the same code differ by no more, relatively


def checks(run: Examined) -> Iterator[Check]:
    """Yields the weights of each tensor a step after a reload, beside those without it.

    A gradient that is 0 but for rounding errors is left out: two backends may have any there. So is one that was not
    seen in the first step.
    """
    reload, first, replay = run.findings.reload, run.findings.first.finite, run.findings.replays.get("first")
    if reload is None or first is None:
        return
    roundings = replay.rounding if replay else run.findings.rounding
    for name, e in reload.tensors.items():
        gradient, update, rounding = first.gradients.get(name), first.first_update.get(name), roundings.get(name)
        if not (gradient and update and rounding) or gradient.norm <= rounding.error or not math.isfinite(e.norm):
            continue
        limit = (FP32 + stored_coarsely(run)) * update.weights
        if run.findings.recipe.linear:
            right = tensor_limit(run, replace(gradient, error=0.0), rounding)
            limit += PART * run.unit_roundoff * e.norm + 2 * update.gain * _faster(run) * right
        else:
            share = max(PART * run.unit_roundoff, K * rounding.error / gradient.norm)
            limit += _turned(min(share, 1.0), gradient.elements) * e.norm
        because = f"{name} is {e.error / e.norm if e.norm else math.inf:.1e} of its step away from where it is without "
        because += "the reload, one step after it"
        yield Check(f"weights after a reload, {name}", e.error, limit, "resume", because)


def _faster(run: Examined) -> float:
    """Returns by how much the learning rate grows from the first update to the second, where a schedule changes it."""
    rates = run.findings.first.rates
    return max(rates[1] / rates[0], 1.0) if len(rates) > 1 and rates[0] else 1.0


def _turned(share: float, elements: int) -> float:
    """Returns the norm of a change of Adam's over that of the update, where the signs of gradients next to 0 turn: of
    this share of them, and of as many more as Poisson has once in 1000, each by twice its update."""
    turned = math.ceil(special.pdtrik(1 - RARE, share * elements))
    return 2 * math.sqrt(min(turned, elements) / max(elements, 1))
