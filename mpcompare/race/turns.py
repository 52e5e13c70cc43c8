"""The turns of a race: at any moment one of its entrants computes. Nothing here knows processes or backends.

each entrant            (start), Train
each entrant, a round   Prepare, Time, Conclude
each entrant            Finish
"""

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from mpcompare.errors import check_number
from mpcompare.fields import Timing
from mpcompare.race.orders import Conclude, Finish, Order, Prepare, Progress, Time, Train, Turn
from mpcompare.race.timetable import TIMING

if TYPE_CHECKING:  # rich is slow to import, and a report imports this file
    from mpcompare.race.progress import Board


@dataclass(frozen=True)
class Rules:
    """The rules that say when enough blocks are timed: section ``measure`` of the configuration."""

    rel_ci: float  # half width of a 95 % interval, relative to its ratio, that is narrow enough
    budget_s: float  # seconds that timing takes at most, however wide the intervals are; at least one round is timed
    block_s: float  # seconds of a block, about; it has at least one step

    def __post_init__(self) -> None:
        check_number("measure.rel_ci", self.rel_ci, above=0, below=1)
        check_number("measure.budget_s", self.budget_s, above=0)
        check_number("measure.block_s", self.block_s, above=0)


class Racer(Protocol):
    """An entrant, as its race sees it."""

    name: str

    def turn(self, order: Order | None) -> Turn | None:
        """Takes one turn, from ``order`` (None: the start, or the rest of a turn that goes on) to its end; returns None
        if the entrant has ended."""


# The first look is taken after so many rounds: from fewer the spread, which plans the next look, is hardly known.
MIN_ROUNDS = 10

_UNFORESEEN = random.SystemRandom()  # a generator with a seed could be run ahead


def race(
    entrants: Sequence[Racer],
    rules: Rules,
    board: "Board",
    name: str | None = None,
    trained: Callable[[str], object] = lambda name: None,
) -> None:
    """Runs all entrants to their ends. An entrant that is gone early is left out; the others go on. The ``name`` is for
    records; None for one entrant alone. ``trained`` is told of each trained entrant before the next one begins."""
    racing = [entrant for entrant in entrants if _turn(entrant, None, board)]
    able = []
    for entrant in racing:
        if turn := _turn(entrant, Train(), board):
            board.line(f"{entrant.name}: {turn.text}")
            able.append(entrant)
            trained(entrant.name)
    blocks, finish = _time(able, rules, board, name)
    for entrant, step_ms in blocks.items():
        _turn(entrant, replace(finish, compared=_drawn(step_ms)), board)


def _turn(entrant: Racer, order: Order | None, board: "Board") -> Turn | None:
    turn = entrant.turn(order)
    board.end_turn(entrant.name, gone=turn is None)
    return turn


def _block(entrant: Racer, untimed: int, order: Time, board: "Board") -> Turn | None:
    """Lets an entrant time one block, and times it by the race's clock, too; returns None if the entrant is gone.
    ``untimed`` is the seed of the steps before the block."""
    if not _turn(entrant, Prepare(untimed), board):
        return None
    told = time.monotonic()
    if not _turn(entrant, order, board):  # its clock starts
        return None
    heard = time.monotonic()
    turn = _turn(entrant, None, board)
    over = time.monotonic()
    return turn if turn and _turn(entrant, Conclude(over - heard, over - told), board) else None


def _drawn(step_ms: Sequence[float]) -> int:
    """Returns the round of the block that is compared with the examined backend's, drawn from the faster half. Whoever
    gains by computing something else does so in more than half of the blocks, because the median is reported."""
    median = statistics.median(step_ms)
    return _UNFORESEEN.choice([number for number, ms in enumerate(step_ms, start=1) if ms <= median])


def _time(
    racing: Sequence[Racer], rules: Rules, board: "Board", name: str | None
) -> tuple[dict[Racer, list[float]], Finish]:
    """Times rounds of blocks until the rules say that it is enough; returns who is left, and their times."""
    _show(racing, 0, math.inf, 0.0, rules, board)
    from mpcompare.race import intervals  # scipy is slow to import, and --help imports this file

    start = time.monotonic()
    blocks: dict[Racer, list[float]] = {entrant: [] for entrant in racing}  # milliseconds a step, without who is gone

    def widest() -> float:
        if len(blocks) == 1:
            return intervals.interval(*blocks.values()).half_width
        return max(intervals.ratio(a, b).half_width for a, b in itertools.combinations(blocks.values(), 2))

    look, half_width = MIN_ROUNDS, math.inf
    for rounds in itertools.count(1):
        untimed, seed = (_UNFORESEEN.getrandbits(32) for _ in range(2))
        for entrant in _order([*blocks], rounds):
            if turn := _block(entrant, untimed, Time(rounds, seed), board):
                blocks[entrant].append(turn.step_ms)
            else:
                del blocks[entrant]
        seconds = time.monotonic() - start
        done = not blocks or seconds * (rounds + 1) / rounds > rules.budget_s  # another would end too late
        if blocks and (done or rounds == look):
            half_width = widest()
            done |= half_width <= rules.rel_ci
            look = _next_look(rounds, half_width, rules.rel_ci)
        _show([*blocks], rounds, half_width, seconds, rules, board)
        if done:
            stopped = "rel_ci" if half_width <= rules.rel_ci and rounds >= MIN_ROUNDS else "budget"
            finish = Finish(rounds, stopped, half_width, seconds, name if len(blocks) > 1 else None, compared=0)
            break
    if blocks:
        board.line(describe_timing(finish))
    return blocks, finish


def _order(racing: Sequence[Racer], rounds: int) -> list[Racer]:
    """Returns the entrants in the order of a round: rotated by one from round to round, and backwards every other time
    around. So none always goes first, and none always follows the same other."""
    if not racing:
        return []
    first = rounds % len(racing)
    order = [*racing[first:], *racing[:first]]
    return order if rounds // len(racing) % 2 == 0 else order[::-1]


def _next_look(rounds: int, half_width: float, rel_ci: float) -> int:
    """Returns the round at which the interval should be narrow: its width falls with the square root of their number.

    Looking after each round and stopping at the first narrow interval would stop where the noise happens to look small:
    91 of 100 such intervals would hold the truth in place of 95.
    """
    expected = rounds * (half_width / rel_ci) ** 2
    return math.ceil(min(max(expected, 1.25 * rounds), 4 * rounds))


def _show(
    racing: Sequence[Racer], rounds: int, half_width: float, seconds: float, rules: Rules, board: "Board"
) -> None:
    known = f", known within {100 * half_width:.1f} %" if half_width < math.inf else ""
    for entrant in racing:
        taken = f"{rounds} round{'s' if rounds != 1 else ''} of blocks"
        text = f"{taken}{known}, {seconds:.0f} of {rules.budget_s:g} s at most"
        board.progress(entrant.name, Progress(min(seconds, rules.budget_s), rules.budget_s, text, TIMING))


def describe_timing(timing: Timing) -> str:
    """Returns the end of timing in words."""
    rounds, half_width = timing.rounds, timing.half_width
    what = "every ratio of two runs" if timing.race else "the step time"
    why = "narrow enough" if timing.stopped == "rel_ci" else "the time budget ended (measure.budget_s)"
    within = f"{what} is known within {100 * half_width:.1f} % (95 %)"
    known = within if half_width < math.inf else "too few for an interval"
    return f"{rounds} round{'s' if rounds != 1 else ''} of blocks, stopped because {why}: {known}"
