"""Errors that are planted into the findings themselves: the judgement must flag each, or it has not seen.

A tensor is drawn of those that are said to be seen. Its gradient is taken as negated, as halved, and as that of another
order of its elements, and judged again. This tests every line between a measured error and the verdict.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mpcompare.verdict.judge import gradients, layers
from mpcompare.verdict.judge.check import Case, Check
from mpcompare.verdict.judge.errors import GradientError, known

# What each makes of the errors of a gradient g that is right: ||-g - g|| = 2 ||g||, and so on. Another order of the
# elements has no part in the direction of g.
PLANTED: dict[str, Callable[[GradientError], GradientError]] = {
    "negated": lambda e: replace(e, error=2 * e.norm, slope=-e.slope),
    "halved": lambda e: replace(e, error=e.norm / 2, slope=e.slope / 2),
    "in another order": lambda e: replace(e, error=math.sqrt(2) * e.norm, slope=0.0, residual=e.norm),
}


def not_flagged(case: Case, seen: Sequence[str]) -> list[str]:
    """Returns in words what was planted and is not flagged; empty where all is, and where nothing is seen.

    Args:
        seen: names of gradients of the first step.
    """
    if not seen:
        return []
    name = seen[zlib.crc32(" ".join(seen).encode()) % len(seen)]
    words = {what: f"the gradient of {name} taken as {what}" for what in PLANTED}
    return [words[what] for what, spoil in PLANTED.items() if all(c.passed for c in _judged(case, name, spoil))]


def _judged(case: Case, name: str, spoil: Callable[[GradientError], GradientError]) -> Iterator[Check]:
    """Yields the checks of the first step with one gradient spoilt."""
    findings = case.run.findings
    if shown := findings.replays.get("first"):
        first = replace(shown, gradients={**shown.gradients, name: spoil(known(shown.gradients[name]))})
        run = replace(case.run, findings=replace(findings, replays={**findings.replays, "first": first}))
        yield from layers.checks(replace(case, run=run))
    elif finite := findings.first.finite:
        step = replace(finite, gradients={**finite.gradients, name: spoil(known(finite.gradients[name]))})
        run = replace(case.run, findings=replace(findings, first=replace(findings.first, finite=step)))
        yield from gradients.checks(replace(case, run=run))
