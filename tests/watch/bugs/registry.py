"""The registry of drawn bugs: each is a loop with one override, under the id by which docs/watch/drawn.csv names it.

    @bug("vsepp#4", "bf16", fair="dropout, later steps")
    class StaysInEvaluation(NanoGPT):
        \"\"\"One sentence on what happens there.\"\"\"

``fair`` holds the causes that would be fair names, written down before a watch saw the bug. They are the fair names of
the tables of real bugs, and a few names for the same bug as a watch sees it from another side.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from watch.drawn import draw
from watch.loops.base import Loop


@dataclass(frozen=True)
class Bug:
    """A real bug in a loop.

    Attributes:
        id, link: as in the table of drawn bugs.
        loop: the loop that has the bug.
        precision: the precision that is asked for.
        fair: the causes that would be fair names for the bug.
        after: the number of updates before the watched ones.
        steps: the number of watched updates.
    """

    id: str
    link: str
    loop: type[Loop]
    precision: str
    fair: tuple[str, ...]
    after: int = 0
    steps: int = 5

    @property
    def what(self) -> str:
        """The bug in a sentence or two."""
        return re.sub(r"\s+", " ", (self.loop.__doc__ or "").strip())


BUGS: list[Bug] = []
LINKS = {row["id"]: row["link"] for row in draw()}


def bug(name: str, precision: str, fair: str, after: int = 0, steps: int = 5) -> Callable[[type[Loop]], type[Loop]]:
    """Registers the loop that it decorates under the bug ``name``; KeyError if this bug was not drawn."""
    causes = tuple(cause.strip() for cause in fair.split(","))

    def register(loop: type[Loop]) -> type[Loop]:
        BUGS.append(Bug(name, LINKS[name], loop, precision, causes, after, steps))
        return loop

    return register
