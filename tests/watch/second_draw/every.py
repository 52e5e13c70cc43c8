"""All bugs of the second draw, in the order of the table that was made blind."""

from watch.second_draw import (
    accumulation,
    adapters,
    attention,
    clipping,
    layers,
    losses,
    optimizers,
    parts,
    scaling,
    state,
)
from watch.second_draw.registry import BUGS, table

MODULES = (accumulation, adapters, attention, clipping, layers, losses, optimizers, parts, scaling, state)

ORDER = list(table("second", "blind"))
BUGS.sort(key=lambda bug: ORDER.index(bug.thread))

__all__ = ["BUGS", "MODULES"]
