"""Signs that a step time is not what it seems: work outside of turns, a clock that goes wrong, steps that return early,
phases that do not add up to a step."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import special  # scipy.stats takes half a second to import

from mpcompare.numerals import short
from mpcompare.report.comparison import Entry
from mpcompare.verdict.judge.timed_steps import clock_because, clocks_apart

# Cores. Ratios are known within 2 % (measure.rel_ci), and that much of a core can shift them by as much. An entrant
# that waits uses 0.0004, and 0.002 where its blocks take 10 ms: the messages between two turns.
OUT_OF_TURN = 0.02
# A share of a block: whoever computes so much of a block in the turns of others shortens the block by as much.
OF_A_BLOCK = 0.02
MESSAGES_S = 0.001  # CPU time that a wait takes at most, for its messages and for waking up
READING_MS = 1.0  # 200 weights are read in less
OTHERS = 0.25  # cores that other programs keep busy, from which on they are named
LAYOUT = 0.05  # the place of its memory makes a program up to so much faster or slower; the phases have one place
RARE = 1e-3


def clocks_cost(entry: Entry) -> str:
    """Returns the cost of the clock between the phases; ``in the noise`` where blocks differ by more, p20
    to p80, or where there is one block alone."""
    result = entry.run.finished
    spread = (result.blocks.step_ms_p80 - result.blocks.step_ms_p20) / result.blocks.step_ms_p50
    cost = result.phases.phase_overhead
    return f"{100 * cost:+.1f} %" if cost > spread > 0 else "in the noise"


def out_of_turn(entry: Entry) -> float:
    """Returns the cores that the entrant kept busy while others had their turns; 0 where it waited, or had none to wait
    for, or where its work moves no ratio by more than the half width of the ratio's interval.

    The work is too much where it disturbs the others, or where it could be a part of the entrant's own block. Both are
    judged by all waits together: a median would not see work in every third wait. The first wait lasts as long as
    others train, and is left out where there are more.
    """
    timing = entry.run.finished.blocks.timing
    if not timing.race:
        return 0.0
    blocks = entry.run.blocks[1:] if len(entry.run.blocks) > 1 else entry.run.blocks
    used = blocks["cpu_s_between_turns"].sum()
    cores = float(used / blocks["s_between_turns"].sum())
    computed_s = (blocks["step_ms"] * blocks["steps"]).sum() / 1e3
    known = timing.half_width if math.isfinite(timing.half_width) else 0.0
    ahead = used > max(max(OF_A_BLOCK, known) * computed_s, MESSAGES_S * len(blocks))
    return cores if cores > max(OUT_OF_TURN, known * (entry.run.finished.machine.threads or 1)) or ahead else 0.0


def doubts(entry: Entry, finished: Sequence[Entry]) -> list[str]:
    """Returns a line for each sign that the blocks of an entrant and its steps do not fit together.

    Args:
        finished: all entries of its comparison that finished.
    """
    apart = None if entry.run.findings else clocks_apart(entry.run.blocks)  # an examined run's verdict says it
    clock = clock_because(entry.run.blocks) if apart and apart[0] > apart[1] else ""
    return [f"{entry.label}: {text}" for text in (clock, _reading(entry, finished), _phases(entry)) if text]


def _reading(entry: Entry, finished: Sequence[Entry]) -> str:
    """Says so where a block went on for long after its last step had returned, on a CPU; a GPU's queue always does.

    A loaded machine reads slowly, too. So the median of the other runs in the same round is taken off. A run that took
    no turns has no such median: nothing is said of it where other programs computed.
    """
    run, blocks = entry.run, entry.run.blocks.set_index("round")
    if run.finished.machine.device != "cpu" or (run.race is None and blocks["other_cores"].median() > OTHERS):
        return ""
    read_ms, block_ms = blocks["read_ms"], blocks["step_ms"] * blocks["steps"]
    others = [e.run for e in finished if run.race is not None and e.run is not run and e.run.race == run.race]
    of_others = {place: each.blocks.set_index("round")["read_ms"] for place, each in enumerate(others)}
    usual = pd.DataFrame(of_others, index=blocks.index).median(axis=1).fillna(0.0) if others else 0.0
    if not (read_ms - usual > np.maximum(OF_A_BLOCK * block_ms, READING_MS)).mean() > 0.5:
        return ""
    why = "its steps return before they are finished, or its weights are copied"
    share = (read_ms / block_ms).median()
    return f"reading loss and weights took {100 * share:.0f} % of a block, which is in its time: {why}"


def _phases(entry: Entry) -> str:
    """Says so where the phases of a step do not add up to the time of a step, and no other program is the reason.

    They are one more block, so their sum is within Student's t of the others on a logarithmic scale, and the clock
    between them may cost something.
    """
    result, blocks = entry.run.finished, entry.run.blocks
    sum_ms, times = result.phases.phase_sum_ms, np.log(blocks["step_ms"].to_numpy(dtype=float))
    if len(times) < 2 or blocks["other_cores"].median() > OTHERS:
        return ""
    t = float(special.stdtrit(len(times) - 1, 1 - RARE / 2))
    reach = t * float(times.std(ddof=1)) * math.sqrt(1 + 1 / len(times)) + math.log1p(LAYOUT)
    away = (math.log(sum_ms) if sum_ms > 0 else -math.inf) - float(times.mean())
    if -reach <= away <= reach + math.log1p(max(result.phases.phase_overhead, 0.0)):
        return ""
    block = f"a step in a block {short(result.blocks.step_ms_p50)} ms"
    return f"the phases of a step take {short(sum_ms)} ms together, and {block}: one of the two is not right"
