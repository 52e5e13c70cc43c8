"""The pass that finds where training begins: at the initial weights, or at a checkpoint of the same task."""

from mpcompare.entrant import resume
from mpcompare.entrant.start import Start
from mpcompare.entrant.state import Entrant, Nothing, Pass


def take(entrant: Entrant) -> Pass[resume.Resumed | Nothing]:
    """Needs ``checkpoint`` and ``setup``. Leaves ``start``."""
    yield from ()
    plan, setup, saved = entrant.plan, entrant.setup, entrant.checkpoint
    if saved is None:
        entrant.start = Start(setup, None)
        return Nothing()
    folder = plan.resume.folder
    checkpoint = resume.fit(saved, resume.what_is_trained(plan, setup), setup.loss_scale, folder)
    entrant.start = Start(setup, checkpoint)
    return resume.describe(checkpoint, folder)
