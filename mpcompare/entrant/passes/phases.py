"""The pass that times the phases of a step."""

from mpcompare.entrant.phases import PhaseTimes, time_phases
from mpcompare.entrant.state import Entrant, Pass
from mpcompare.entrant.timing import fresh
from mpcompare.instruments import heap


def take(entrant: Entrant) -> Pass[PhaseTimes]:
    """Needs ``setup``, ``trained`` and ``trial``. Leaves nothing."""
    yield from ()
    setup = entrant.setup
    heap.fill_holes()  # the trained backend has left some
    stepper = fresh(setup, entrant.trained)
    return time_phases(stepper, setup.batches(), entrant.trial.steps, setup.clock, setup.task)
