"""The pass that reads the checkpoint to continue from, before anything is made: a wrong one ends the run at once."""

from mpcompare.entrant import going_on, resume
from mpcompare.entrant.state import Entrant, Nothing, Pass
from mpcompare.records import EXAMINED


def take(entrant: Entrant) -> Pass[Nothing]:
    """Needs nothing. Leaves ``checkpoint`` and ``taken``."""
    yield from ()
    plan, result = entrant.plan, entrant.recorder.result
    saved = going_on.find(plan, result) if plan.resume.goes_on else resume.find(plan)
    entrant.checkpoint = saved
    entrant.taken = EXAMINED in result and saved is not None and saved.step == plan.train.last_step
    return Nothing()
