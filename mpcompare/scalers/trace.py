"""The way of a loss scale: a scaler's scale before and after each step, and whether the step was skipped."""

from collections.abc import Sequence
from dataclasses import dataclass

from mpcompare.scalers.overflows import OverflowStep
from mpcompare.scalers.policies import ScalerPolicy, ScalerStopped
from mpcompare.scalers.registry import Code, Library
from mpcompare.scalers.scaler import Scaler


@dataclass(frozen=True)
class TakenStep:
    """A step as a scaler took it.

    Attributes:
        unknown: whether the record does not tell if gradients overflow at this scale.
        stopped: whether the library ended training here.
    """

    before: float
    after: float
    skipped: bool
    unknown: bool = False
    stopped: bool = False


@dataclass(frozen=True)
class Trace:
    """All steps of one scaler, up to the one that ended training, if any."""

    name: str
    policy: ScalerPolicy
    code: Code
    start: float
    steps: Sequence[TakenStep]

    @property
    def skipped(self) -> int:
        return sum(step.skipped for step in self.steps)

    @property
    def unknown(self) -> int:
        return sum(step.unknown for step in self.steps)

    @property
    def end(self) -> float:
        return self.steps[-1].after

    @property
    def stopped(self) -> bool:
        return self.steps[-1].stopped


def trace(library: Library, policy: ScalerPolicy, steps: Sequence[OverflowStep]) -> Trace:
    """Lets a library's scaler take ``steps``, or its policy where the library is not installed."""
    scaler, code = library.scaler(policy)
    return Trace(library.name, policy, code, scaler.scale, take(scaler, steps))


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
