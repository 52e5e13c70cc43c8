"""Times of blocks are true: the race's own clock saw them pass, and the block that was compared is one that counts."""

from collections.abc import Iterator

import pandas as pd

from mpcompare.race.intervals import MIN_VALUES
from mpcompare.verdict.judge.check import Check, Timed

OF_A_BLOCK = 0.02  # ratios are known within that (measure.rel_ci)
MARK_MS = 1.0  # a clock on a GPU begins later than the wall's and ends earlier: a kernel is launched in less


def checks(timed: Timed) -> Iterator[Check]:
    """Yields a check of the two clocks where there are enough blocks, and one of the block that was compared."""
    if apart := clocks_apart(timed.blocks):
        value, limit = apart
        yield Check("clock of timed blocks", value, limit, "clock", clock_because(timed.blocks))
    step_ms = timed.blocks.set_index("round")["step_ms"]
    share = float(step_ms[timed.record.timing.compared] / step_ms.median())
    because = f"the block that was compared took {share:.2f} times the median of all blocks"
    yield Check("time of the compared block", share, 1.0, "timed steps", because)


def clocks_apart(blocks: pd.DataFrame) -> tuple[float, float] | None:
    """Returns the milliseconds by which a block by the entrant's clock is longer or shorter than the race's clock
    allows, in the median, and how many they may be; None of too few blocks.

    A message is heard after it was sent, however full the machine is. So the block lasts no longer than from the race's
    order to the news of its end. And the race hears of its beginning no sooner, and of its end no later, than the
    entrant's clock says of the moments before the one message and after the answer to the other:

        block <= longest,    seen <= block + messages

    A clock that goes wrong changes the median that is reported only if it does so in half of the blocks.
    """
    seen_ms, block_ms = blocks["seen_s"] * 1e3, blocks["step_ms"] * blocks["steps"]
    if blocks["messages_s"].count() < MIN_VALUES:
        return None
    too_long = block_ms - blocks["longest_s"] * 1e3
    too_short = seen_ms - block_ms - blocks["messages_s"] * 1e3
    wrong_ms = too_long.where(too_long > too_short, too_short).clip(lower=0)
    return float(wrong_ms.median()), float(OF_A_BLOCK * seen_ms.median() + MARK_MS)


def clock_because(blocks: pd.DataFrame) -> str:
    """Returns the sentence for clocks that are apart."""
    rate = float((blocks["step_ms"] * blocks["steps"] / 1e3 / blocks["seen_s"]).median())
    return f"the clock of its process says {rate:.2f} of the time that the race saw its blocks take"
