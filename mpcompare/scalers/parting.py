"""The place where a scaler parts from torch's: the first step that it takes otherwise, and the reason."""

from dataclasses import dataclass

from mpcompare.scalers.policies import LARGEST, ScalerPolicy, good_steps_to_grow
from mpcompare.scalers.power import power
from mpcompare.scalers.trace import TakenStep, Trace


@dataclass(frozen=True)
class Parting:
    """The first step (from 1) that a scaler skips where torch does not, or changes its scale by another factor."""

    step: int
    why: str


def parting(torch: Trace, other: Trace) -> Parting | None:
    """Returns where ``other`` parts from ``torch``; None if both take all steps alike, whatever their init scales."""
    for number, (a, b) in enumerate(zip(torch.steps, other.steps, strict=False), start=1):
        if b.stopped:
            return Parting(number, f"it stops with an error, because the scale is at its minimum, {power(b.before)}")
        if a.skipped != b.skipped:
            return Parting(number, _another_scale(a, b))
        if _factor(a) != _factor(b):
            explain = _after_overflow if b.skipped else _after_good_step
            return Parting(number, explain(a, b, torch.policy, other.policy))
    return None


def _factor(step: TakenStep) -> float:
    return step.after / step.before if step.after != step.before else 1.0


def _another_scale(a: TakenStep, b: TakenStep) -> str:
    which = "overflows" if b.skipped else "does not overflow"
    return f"at its scale of {power(b.before)} the step {which}, unlike at torch's, {power(a.before)}"


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
    if grows and a.before * 2 > LARGEST:
        return f"torch stays at {power(a.after)}, because fp32 has no larger power, and it grows to {power(b.after)}"
    if waits and b.before * 2 > LARGEST:
        return f"it stays at {power(b.after)}, because fp32 has no larger power"
    if torch.growth_interval != other.growth_interval:
        return f"growth interval {other.growth_interval}, torch's is {torch.growth_interval}"
    late, soon = good_steps_to_grow(other), good_steps_to_grow(torch)
    return f"counts late: grows at good step {late}, torch at {soon} (growth interval {other.growth_interval})"
