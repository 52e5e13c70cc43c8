"""The pass that finds where training begins: at the initial weights, or at a checkpoint of the same task."""

from dataclasses import dataclass
from typing import Any

from mpcompare.entrant import resume
from mpcompare.entrant.start import Start
from mpcompare.entrant.state import Entrant, Nothing, Pass


@dataclass(frozen=True)
class Resumed:
    """A part of ``result.json``.

    Attributes:
        resumed_from: :func:`mpcompare.entrant.resume.describe`.
    """

    resumed_from: dict[str, Any]


def take(entrant: Entrant) -> Pass[Resumed | Nothing]:
    """Needs ``checkpoint`` and ``setup``. Leaves ``start``."""
    yield from ()
    plan, setup, saved = entrant.plan, entrant.setup, entrant.checkpoint
    if saved is None:
        entrant.start = Start(setup, None)
        return Nothing()
    folder = plan.resume.folder
    checkpoint = resume.fit(saved, resume.what_is_trained(plan, setup), setup.loss_scale, folder)
    entrant.start = Start(setup, checkpoint)
    return Resumed(resume.describe(checkpoint, folder))
