"""The pass that tries out how many steps a timed block has."""

from mpcompare.entrant.state import Entrant, Nothing, Pass
from mpcompare.entrant.timing import fresh, try_block


def take(entrant: Entrant) -> Pass[Nothing]:
    """Needs ``setup``, ``trained`` and ``stepper``. Leaves ``trial``.

    A backend that will be examined stays as training left it, and another takes the steps. Without an examination the
    trained one takes them itself, so that there is one backend in memory.
    """
    yield from ()
    setup, examined = entrant.setup, entrant.plan.verdict.enabled
    stepper = fresh(setup, entrant.trained) if examined else entrant.stepper
    entrant.trial = try_block(stepper, setup.batches(), entrant.plan.measure.block_s, setup.clock)
    return Nothing()
