"""The sight of an examination: the smallest relative error of a gradient that it would have found.

A check finds what is larger than its limit. Where one rounding of each result, or the reference's own error, is as
large as a tensor, nothing can be seen of it, and a verdict must not be green.

And errors are planted into the findings themselves: the judgement must flag each, or it has not seen. A tensor is drawn
from the tensors that are said to be seen. Its gradient is taken as negated, as halved, and with its
elements in another order, and is judged again. This tests every line between a measured error and the verdict.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from mpcompare.verdict.judge import gradients, layers
from mpcompare.verdict.judge.causes import Pass
from mpcompare.verdict.judge.check import Case, Checks
from mpcompare.verdict.judge.errors import GradientError, known
from mpcompare.verdict.judge.gradients import errors_of, vanishes
from mpcompare.verdict.judge.layers import as_pass
from mpcompare.verdict.judge.limits import COARSEST, place_limit, roundings
from mpcompare.verdict.judge.replayed import Layers

ENOUGH = 0.95  # the share of the numbers of the parameters that must be seen
# The error that each makes of a gradient g that is right: ||-g - g|| = 2 ||g||, and so on. A gradient with its elements
# in another order has no part in the direction of g.
PLANTED: dict[str, Callable[[GradientError], GradientError]] = {
    "negated": lambda e: replace(e, error=2 * e.norm, slope=-e.slope),
    "halved": lambda e: replace(e, error=e.norm / 2, slope=e.slope / 2),
    "in another order": lambda e: replace(e, error=math.sqrt(2) * e.norm, slope=0.0, residual=e.norm),
}


@dataclass(frozen=True)
class Sight:
    """The sight of the examination of a first step."""

    share: float  # the share of the numbers of the parameters whose gradients are seen
    unseen: list[str]  # the parameters whose gradients are not seen
    layers: list[str]  # the layers that are not seen
    resolution: float  # the relative error that is found in at least half of the gradients that do not vanish
    # the parameters whose gradients are 0 but for roundings: roundings are their limit, so no relative error is found
    vanishing: list[str] = field(default_factory=list)
    not_flagged: list[str] = field(default_factory=list)  # planted errors that are not flagged, in words

    @property
    def blind(self) -> list[str]:
        """The layers and parameters that are not seen."""
        return [*self.layers, *self.unseen, *self.vanishing]

    @property
    def enough(self) -> bool:
        """Whether a verdict may be ``same``."""
        return self.share >= ENOUGH and not self.layers and not self.not_flagged


def said(resolution: float) -> str:
    """Returns ``0.7 % or more``, with one digit where it is below 10 %."""
    return f"{100 * resolution:{'.1g' if resolution < 0.095 else '.0f'}} % or more"


def sight(case: Case) -> Sight | None:
    """Returns how far the examination of a run sees; None where it shows no gradients."""
    run, reference = (each.findings.replays.get("first") for each in (case.run, case.reference))
    blind = _unseen_layers(case, run, reference) if run else []
    if run is not None and run.loss_is_replayed:
        step, rounding = as_pass(case, run, reference), run.rounding
    else:
        own, beside = case.run.findings.first.finite, case.reference.findings.first.finite
        if not (own and own.gradients and beside and beside.gradients):
            return None
        step, rounding = Pass(own, beside), case.run.findings.rounding
    errors = errors_of(case.run, step, rounding)
    exact = {name: known(step.reference.gradients[name]) for name in errors}
    zero = [name for name in errors if vanishes(name, step.reference, rounding)]
    vanishing = [name for name in zero if exact[name].norm]
    alive = [name for name in errors if name not in zero]
    finest = {name: errors[name].limit / exact[name].norm if exact[name].norm else 0.0 for name in alive}
    unseen = [name for name, each in finest.items() if not each <= COARSEST]
    elements = {name: max(e.elements, 1) for name, e in exact.items()}
    share = sum(elements[name] for name in errors if name not in (*unseen, *vanishing)) / max(sum(elements.values()), 1)
    middle = sorted(finest.values())[len(finest) // 2] if finest else 0.0
    fine = [name for name in finest if name not in unseen and step.own.gradients.get(name)]
    planted = [] if case.is_reference else not_flagged(case, fine)
    return Sight(share, unseen, blind, middle, vanishing, planted)


def _unseen_layers(case: Case, run: Layers, reference: Layers | None) -> list[str]:
    """Returns the layers whose output, or the gradient there, is not seen."""
    others = reference.places if reference else {}
    unseen: dict[str, None] = {}
    for at, place in run.places.items():
        kind, _, layer = at.partition(" ")
        blind = place_limit(case.run, place, others.get(at)) > COARSEST * place.norm
        if kind in ("output", "gradient") and blind and place.norm > roundings(case.run, place):
            unseen[layer] = None
    return list(unseen)


def not_flagged(case: Case, seen: Sequence[str]) -> list[str]:
    """Returns in words what was planted and is not flagged, of the gradients of the first step that are ``seen``; empty
    where all is, and where nothing is seen."""
    if not seen:
        return []
    name = seen[zlib.crc32(" ".join(seen).encode()) % len(seen)]
    missed = [what for what, spoil in PLANTED.items() if all(check.passed for check in _judged(case, name, spoil))]
    return [f"the gradient of {name} taken as {what}" for what in missed]


def _judged(case: Case, name: str, spoil: Callable[[GradientError], GradientError]) -> Checks:
    """Yields the checks of the first step with one gradient spoilt."""
    findings = case.run.findings
    if (shown := findings.replays.get("first")) and shown.loss_is_replayed:
        own = shown.gradients | shown.of_kernels
        first = replace(shown, gradients={**own, name: spoil(known(own[name]))}, of_kernels={})
        run = replace(case.run, findings=replace(findings, replays={**findings.replays, "first": first}))
        yield from layers.checks(replace(case, run=run))
    elif finite := findings.first.finite:
        step = replace(finite, gradients={**finite.gradients, name: spoil(known(finite.gradients[name]))})
        run = replace(case.run, findings=replace(findings, first=replace(findings.first, finite=step)))
        yield from gradients.checks(replace(case, run=run))
