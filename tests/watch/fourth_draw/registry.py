"""The registry of the fourth draw: real bugs of training loops, in the form of the second draw.

``drawn.csv`` names the threads that were met, the searches that found the taken ones, and why others were left out.
From each search the first threads were taken, four at most. Kinds, fair names and what was meant were written down
before a watch saw any of the loops.

Each defect also has a careful loop. It is right, and does what the loop of the bug should have done. It is written as
somebody else may write it, with helpers, schedules, averages and evaluations in between. A watch must not accuse it.

Two loops did not show their bug at first, and were mended before that: the logits of facebookresearch/dinov2#583 and
the sums of idiap/fast-transformers#32 did not overflow. The right targets of the former were others in exact numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from watch.second_draw.registry import Bug, Training, bug_of

BUGS: list[Bug] = []
bug = partial(bug_of, BUGS)


@dataclass(frozen=True)
class Careful:
    """A right loop that stands for a defect.

    Attributes:
        thread: the thread of the defect.
        what: what is unusual in the loop.
        meant: what its user meant, in the words of the watch's ``expect``.
        make: makes the loop.
    """

    thread: str
    what: str
    meant: dict[str, Any]
    make: Callable[[], Training]

    def seeded(self) -> Training:
        """Returns the loop, made with a seed of its own."""
        torch.manual_seed(0)
        return self.make()


CAREFUL: list[Careful] = []


def careful(
    thread: str, what: str, *, precision: str = "bf16", expect: dict[str, Any] | None = None
) -> Callable[[Callable[[], Training]], Callable[[], Training]]:
    """Registers the maker that it decorates."""

    def register(make: Callable[[], Training]) -> Callable[[], Training]:
        CAREFUL.append(Careful(thread, what, {"precision": precision, **(expect or {})}, make))
        return make

    return register
