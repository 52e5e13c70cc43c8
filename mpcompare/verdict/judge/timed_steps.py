"""Do timed steps compute what was examined?

- *Value.* A line of every weight, read as the clock stops and once more when nothing computes. The time of each block
  by the race's clock. One block of the faster half is drawn when all are over, and compared with the same block of the
  trained backend: its time, its losses, and the weights, buffers and moments at its end.
- *Limit.* The lines exactly. The clock within 0.02 of a block ([how](measuring.md#against-backends-that-cheat)). The
  block's time at most the median. Distances as in `resume`, relative to how far the block moved. The fp32 roundings of
  its steps are added; they add up like the root of their number. Where correct runs part, distances are not compared.
"""

import math

import pandas as pd

from mpcompare.precision import PRECISIONS
from mpcompare.race.intervals import MIN_VALUES
from mpcompare.verdict.judge.check import Case, Check, Checks, Timed
from mpcompare.verdict.judge.limits import FP32, reordered_loss, stored_coarsely, update_part
from mpcompare.verdict.judge.trajectories import common_steps

OF_A_BLOCK = 0.02  # ratios are known within this share (measure.rel_ci)
MARK_MS = 1.0  # a GPU's clock begins later than the wall clock and ends earlier; a kernel is launched in less than this


def checks(case: Case) -> Checks:
    """Yields checks where anything was timed; of losses and states only where the backend rounds alike each time."""
    run, timed = case.run, case.run.timed
    if timed is None:
        return
    because = f"weights went on changing after the clock had stopped, in {timed.record.timed_unfinished} timed blocks"
    yield Check("weights after the clock stopped", timed.record.timed_unfinished, 0, "unfinished steps", because)
    if apart := clocks_apart(timed.blocks):
        value, limit = apart
        yield Check("clock of timed blocks", value, limit, "clock", clock_because(timed.blocks))
    step_ms = timed.blocks.set_index("round")["step_ms"]
    share = float(step_ms[timed.record.timing.compared] / step_ms.median())
    because = f"the block that was compared took {share:.2f} times the median of all blocks"
    yield Check("time of the compared block", share, 1.0, "timed steps", because)
    if run.findings.promises.rounding == "stochastic":
        return
    loss, difference = timed.record.timed_loss, timed.record.timed_loss_difference
    if math.isfinite(loss):
        because = f"the loss of a timed step is {difference:.1e} away from what the examined backend gives there"
        yield Check("loss of timed steps", difference, reordered_loss(run, loss), "timed steps", because)
    if common_steps(case.reference) == len(case.reference.steps):
        yield from _states(case, timed)


def _states(case: Case, timed: Timed) -> Checks:
    """Yields the check of each kind of tensors, unless correct runs part in training: they would part here, too.

    Each activation may be rounded once more or less, as in ``resume``. Such errors of updates add up as randomly as the
    updates do, so they are no larger a part of the whole distance. In fp32, u is the unit roundoff of tf32: the errors
    of sums in another order grow over a block, and whatever saves time is coarser. The roundings of the steps add up
    like the root of the number of steps.
    """
    part = update_part(case.run, max(case.run.unit_roundoff, PRECISIONS["tf32"].unit_roundoff))
    for kind, apart in timed.record.timed_state.items():
        difference, moved = apart.difference, apart.moved
        because = f"{kind} after a timed block: {difference:.1e} away from {kind} of the examined backend"
        because += f" after the same steps, which moved by {moved:.1e}"
        limit = part * moved + math.sqrt(timed.record.timed_steps) * (FP32 + stored_coarsely(case.run)) * apart.norm
        if math.isfinite(moved):
            yield Check(f"{kind} after timed steps", difference, limit, "timed steps", because)


def clocks_apart(blocks: pd.DataFrame) -> tuple[float, float] | None:
    """Returns the milliseconds by which a block by the entrant's clock is longer or shorter than the race's clock
    allows, in the median, and the limit of this number; None for too few blocks.

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
