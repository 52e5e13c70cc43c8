"""All bugs of the second draw, in the order of the table that was made blind."""

import csv
from pathlib import Path

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
from watch.second_draw.registry import BUGS

MODULES = (accumulation, adapters, attention, clipping, layers, losses, optimizers, parts, scaling, state)
TABLES = Path(__file__).parents[3] / "docs" / "watch"


def table(name: str) -> dict[str, dict[str, str]]:
    """Returns the rows of a kept table of the second draw by their threads."""
    with (TABLES / f"second_draw_{name}.csv").open(newline="") as file:
        return {row["thread"]: row for row in csv.DictReader(file)}


ORDER = list(table("blind"))
BUGS.sort(key=lambda bug: ORDER.index(bug.thread))

__all__ = ["BUGS", "MODULES", "table"]
