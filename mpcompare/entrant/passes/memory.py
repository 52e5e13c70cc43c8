"""The pass that measures the memory of a step."""

from mpcompare.entrant.memory import Memory, measure_memory
from mpcompare.entrant.state import Entrant, Pass


def take(entrant: Entrant) -> Pass[Memory]:
    """Needs ``setup``. Leaves nothing."""
    yield from ()
    return measure_memory(entrant.setup)
