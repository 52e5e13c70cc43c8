"""The pass of a run that was trained and examined before its sweep was killed: it is taken as it is, and only timed."""

from functools import partial
from typing import cast

from mpcompare.contract import State
from mpcompare.entrant.state import Entrant, Nothing, Pass
from mpcompare.entrant.training import Trained
from mpcompare.records import numbers


def take(entrant: Entrant) -> Pass[Nothing]:
    """Needs ``start``, at the end of training. Leaves ``stepper`` and ``trained``, and ends ``apart``."""
    yield from ()
    start, result = entrant.start, numbers(entrant.recorder.result)
    assert start.checkpoint is not None
    if entrant.apart is not None:
        entrant.apart.close()
    entrant.stepper = start.new_stepper()
    entrant.trained = Trained(
        rows=start.before.rows,
        read=partial(cast, State, start.checkpoint.state),
        updates=start.checkpoint.updates,
        scores={"test_loss": result["test_loss"], "test_accuracy": result["test_accuracy"]},
        moved={},
    )
    return Nothing()
