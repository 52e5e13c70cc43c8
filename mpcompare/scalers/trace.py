"""The way of a loss scale: a scaler's scale before and after each step, and whether the step was skipped; and the first
step that a scaler takes otherwise than torch's."""

from collections.abc import Sequence
from dataclasses import dataclass

from mpcompare.precision import FP32
from mpcompare.scalers.overflows import OverflowStep, power
from mpcompare.scalers.policies import Scaler, ScalerPolicy, ScalerStopped, good_steps_to_grow
from mpcompare.scalers.registry import Library


@dataclass(frozen=True)
class TakenStep:
    """A step as a scaler took it."""

    before: float
    after: float
    skipped: bool
    unknown: bool = False  # whether the record does not tell if gradients overflow at this scale
    stopped: bool = False  # whether the library ended training here


@dataclass(frozen=True)
class Trace:
    """All steps of one scaler, up to the one that ended training, if any."""

    name: str
    policy: ScalerPolicy
    origin: str  # the library, and its version or why its own code is not used
    own: bool  # whether the library's own code took the steps; if not, its policy in policies.py
    start: float
    steps: Sequence[TakenStep]

    @property
    def unknown(self) -> int:
        return sum(step.unknown for step in self.steps)

    @property
    def stopped(self) -> bool:
        return self.steps[-1].stopped


def trace(library: Library, policy: ScalerPolicy, steps: Sequence[OverflowStep]) -> Trace:
    """Lets a library's scaler take ``steps``, or its policy where the library is not installed."""
    scaler, origin = library.scaler(policy)
    own = not isinstance(scaler, ScalerPolicy)
    return Trace(library.name, policy, origin, own, scaler.scale, take(scaler, steps))


def take(scaler: Scaler, steps: Sequence[OverflowStep]) -> list[TakenStep]:
    """Lets ``scaler`` take the steps, each of which overflows or not by the scale that it has there."""
    taken: list[TakenStep] = []
    for step in steps:
        scale = scaler.scale
        try:
            skipped = scaler.step(step.overflows(scale))
        except ScalerStopped:
            return [*taken, TakenStep(scale, scale, True, step.is_unknown(scale), stopped=True)]
        taken.append(TakenStep(scale, scaler.scale, skipped, step.is_unknown(scale)))
    return taken


def parting(torch: Trace, other: Trace) -> tuple[int, str] | None:
    """Returns the number (from 1) of the first step that ``other`` skips where ``torch`` does not, or after which it
    changes its scale by another factor, and why; None if both take all steps alike, whatever their init scales."""
    for number, (a, b) in enumerate(zip(torch.steps, other.steps, strict=False), start=1):
        if b.stopped:
            return number, f"it stops with an error, because the scale is at its minimum, {power(b.before)}"
        if a.skipped != b.skipped:
            which = "overflows" if b.skipped else "does not overflow"
            why = f"at its scale of {power(b.before)} the step {which}, unlike at torch's, {power(a.before)}"
            return number, why
        if _factor(a) != _factor(b):
            explain = _after_overflow if b.skipped else _after_good_step
            return number, explain(a, b, torch.policy, other.policy)
    return None


def _factor(step: TakenStep) -> float:
    return step.after / step.before if step.after != step.before else 1.0


def _after_overflow(a: TakenStep, b: TakenStep, torch: ScalerPolicy, other: ScalerPolicy) -> str:
    if b.before <= other.min_scale:
        return f"it stays at its min scale, {power(other.min_scale)}"
    if b.after == b.before:
        return f"hysteresis {other.hysteresis}: this overflow does not halve the scale yet"
    if b.after <= other.min_scale:
        return f"it backs off to its min scale only, {power(other.min_scale)}"
    return f"torch's scale stays at {power(a.after)}, and it halves"


def _after_good_step(a: TakenStep, b: TakenStep, torch: ScalerPolicy, other: ScalerPolicy) -> str:
    grows, waits = _factor(b) > 1, _factor(a) > 1
    if grows and a.before * 2 > FP32.maximum:
        return f"torch stays at {power(a.after)}, because fp32 has no larger power, and it grows to {power(b.after)}"
    if waits and b.before * 2 > FP32.maximum:
        return f"it stays at {power(b.after)}, because fp32 has no larger power"
    if torch.growth_interval != other.growth_interval:
        return f"growth interval {other.growth_interval}, torch's is {torch.growth_interval}"
    late, soon = good_steps_to_grow(other), good_steps_to_grow(torch)
    return f"counts late: grows at good step {late}, torch at {soon} (growth interval {other.growth_interval})"
