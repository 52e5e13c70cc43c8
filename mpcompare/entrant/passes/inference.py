"""The pass that calls the trained network in each precision, forward only."""

from dataclasses import dataclass
from typing import Any

from mpcompare.entrant.inference import measure_inference
from mpcompare.entrant.state import Entrant, Nothing, Pass


@dataclass(frozen=True)
class InferencePart:
    """A part of ``result.json``.

    Attributes:
        inference: :func:`mpcompare.entrant.inference.measure_inference`.
    """

    inference: dict[str, Any]


def take(entrant: Entrant) -> Pass[InferencePart | Nothing]:
    """Needs ``setup`` and ``trained``. Leaves nothing."""
    yield from ()
    plan, trained = entrant.plan.inference, entrant.trained
    if not plan.enabled:
        return Nothing()
    return InferencePart(measure_inference(entrant.setup, trained.state, trained.scores, plan, entrant.shared))
