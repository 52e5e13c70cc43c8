"""The pass that reads the checkpoint to continue from, before anything is made: a wrong one ends the run at once."""

from mpcompare.entrant import resume
from mpcompare.entrant.state import Entrant, Nothing, Pass


def take(entrant: Entrant) -> Pass[Nothing]:
    """Needs nothing. Leaves ``checkpoint``."""
    yield from ()
    entrant.checkpoint = resume.find(entrant.plan)
    return Nothing()
