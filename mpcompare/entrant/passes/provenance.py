"""The pass that records the machine, its software and their flags, as they are when training begins."""

from mpcompare.entrant.state import Entrant, Pass
from mpcompare.instruments.machine import Provenance, provenance


def take(entrant: Entrant) -> Pass[Provenance]:
    """Needs ``setup``, which has set the flags. Leaves nothing."""
    yield from ()
    return provenance(entrant.setup.device)
