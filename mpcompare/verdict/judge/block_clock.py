"""Times of blocks are true: the race's own clock saw them pass, and the block that was compared is one that counts."""

from collections.abc import Iterator

import pandas as pd

from mpcompare.race.intervals import MIN_VALUES
from mpcompare.verdict.judge.check import Check, Timed

OF_A_BLOCK = 0.02  # ratios are known within that (measure.rel_ci)
MESSAGE_MS = 1.0  # a message between two processes takes less where nobody waits for a core
# A nap ends while the entrant waits, and a message comes while it computes: on a full machine 3 times as late as naps.
LATE = 10.0


def checks(timed: Timed) -> Iterator[Check]:
    """Yields a check of the two clocks where there are enough blocks, and one of the block that was compared."""
    if apart := clocks_apart(timed.blocks):
        value, limit = apart
        yield Check("clock of timed blocks", abs(value), limit, "clock", clock_because(timed.blocks))
    step_ms = timed.blocks.set_index("round")["step_ms"]
    share = float(step_ms[timed.compared] / step_ms.median())
    because = f"the block that was compared took {share:.2f} times the median of all blocks"
    yield Check("time of the compared block", share, 1.0, "timed steps", because)


def clocks_apart(blocks: pd.DataFrame) -> tuple[float, float] | None:
    """Returns the milliseconds by which a block took longer by the race's clock than by the entrant's, in the median,
    and how many they may be; None of too few blocks.

    Both clocks start and stop with a message to the race. A race that wakes up late for one of them sees a block that
    is shorter or longer by that, so it measures how late it wakes up from naps beside each block. To change the median
    that is reported, a clock has to go wrong in half of the blocks, and in half of them no message is so late.
    """
    seen_ms = blocks["seen_s"] * 1e3
    if seen_ms.count() < MIN_VALUES:
        return None
    limit = OF_A_BLOCK * seen_ms.median() + LATE * 1e3 * blocks["late_s"].median() + MESSAGE_MS
    return float((seen_ms - blocks["step_ms"] * blocks["steps"]).median()), float(limit)


def clock_because(blocks: pd.DataFrame) -> str:
    """Returns the sentence for clocks that are apart."""
    rate = float((blocks["step_ms"] * blocks["steps"] / 1e3 / blocks["seen_s"]).median())
    return f"the clock of its process says {rate:.2f} of the time that the race saw its blocks take"
