"""The pass in which the trained backend itself takes the steps that will be timed, before it is examined and freed."""

from dataclasses import dataclass

from mpcompare.entrant.state import Entrant, Pass
from mpcompare.entrant.timing import try_block


@dataclass(frozen=True)
class Part:
    """A part of ``result.json``.

    Attributes:
        timed_loss: the loss of the step after the block.
    """

    timed_loss: float


def take(entrant: Entrant) -> Pass[Part]:
    """Needs ``setup`` and ``stepper``, which goes on from the first batch again. Leaves ``trial``."""
    yield from ()
    setup = entrant.setup
    entrant.trial = try_block(entrant.stepper, setup.batches(), entrant.plan.measure.block_s, setup.clock)
    return Part(timed_loss=entrant.trial.losses[-1])
