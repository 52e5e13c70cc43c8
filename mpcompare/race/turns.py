"""The turns of a race: at any moment one of its entrants computes. Nothing here knows processes or backends.

An entrant is a program that stops at the end of each of its turns and goes on when it is told to: a generator that
yields ``Turn`` and is sent an ``Order`` (``entrant/``), here or in a process of its own (``command/process.py``).

    order       the entrant's turn
    (start)     imports its libraries; all may do this at once
    Train       makes its backend, loads the data, trains, evaluates, is examined
    Time        times one block of steps; once a round, in an order that rotates from round to round
    Finish      times the phases, and measures memory and inference
"""

import itertools
import math
import random
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from mpcompare.errors import check_number
from mpcompare.race.course import TIMING


@dataclass(frozen=True)
class Rules:
    """The rules that say when enough blocks are timed: section ``measure`` of the configuration.

    Attributes:
        rel_ci: half width of a 95 % interval, relative to its ratio, that is narrow enough.
        budget_s: seconds that timing takes at most, however wide the intervals are; at least one round is timed.
        block_s: seconds of a block, about; it has at least one step.
    """

    rel_ci: float
    budget_s: float
    block_s: float

    def __post_init__(self) -> None:
        check_number("measure.rel_ci", self.rel_ci, above=0, below=1)
        check_number("measure.budget_s", self.budget_s, above=0)
        check_number("measure.block_s", self.block_s, above=0)


@dataclass(frozen=True)
class Train:
    pass


@dataclass(frozen=True)
class Time:
    """A block is to be timed.

    Attributes:
        round: its number, from 1.
        seed: that of its batches, the same for every entrant of the round. The race draws it as the round begins, so
            that no entrant knows before its turn what it will compute.
    """

    round: int
    seed: int


@dataclass(frozen=True)
class Finish:
    """Timing is over.

    Attributes:
        rounds: their number.
        stopped: ``rel_ci`` (every interval is narrow enough) or ``budget`` (time ran out).
        half_width: relative half width of the widest interval: of a ratio between two entrants; of the step time, if
            there was one entrant.
        seconds: duration of timing.
        race: a name shared by those that took turns to the end; None for one alone.
    """

    rounds: int
    stopped: str
    half_width: float
    seconds: float
    race: str | None


Order = Train | Time | Finish


@dataclass(frozen=True)
class Progress:
    """A step of progress to show; the turn goes on.

    Attributes:
        done, total: the part of the stage that is done, and all of it.
        stage: the stage of the entrant (``race/course.py``); empty: the one that it is in already.
    """

    done: float
    total: float
    text: str
    stage: str = ""


@dataclass(frozen=True)
class Turn:
    """The end of a turn.

    Attributes:
        step_ms: milliseconds a step, where a block was timed.
        text: a line to show.
    """

    step_ms: float = math.nan
    text: str = ""


Turns = Generator[Progress | Turn, Order | None, None]


class Entrant(Protocol):
    """An entrant, as its race sees it."""

    name: str

    def turn(self, order: Order | None) -> Turn | None:
        """Takes one turn, from ``order`` (None: the start) to its end; returns None if the entrant has ended."""


class Display(Protocol):
    """Shows how a race goes."""

    def progress(self, name: str, progress: Progress) -> None:
        """Shows the progress of an entrant."""

    def end_turn(self, name: str, gone: bool) -> None:
        """Shows that the turn of an entrant is over; one that is ``gone`` takes no other."""

    def line(self, text: str) -> None:
        """Shows a line."""


# The first look is taken after so many: from fewer rounds the spread, which plans the next look, is hardly known.
MIN_ROUNDS = 10

_UNFORESEEN = random.SystemRandom()  # a generator with a seed could be run ahead


def race(
    entrants: Sequence[Entrant],
    rules: Rules,
    display: Display,
    name: str | None = None,
    trained: Callable[[str], object] = lambda name: None,
) -> None:
    """Runs all entrants to their ends. An entrant that is gone early is left out; the others go on.

    Args:
        name: of the race, for the records; None for one entrant alone.
        trained: called with an entrant's name after its turn of training, before the next one's begins.
    """
    racing = [entrant for entrant in entrants if _turn(entrant, None, display)]
    able = []
    for entrant in racing:
        if turn := _turn(entrant, Train(), display):
            display.line(f"{entrant.name}: {turn.text}")
            able.append(entrant)
            trained(entrant.name)
    racing, finish = _time(able, rules, display, name)
    for entrant in racing:
        _turn(entrant, finish, display)


def _turn(entrant: Entrant, order: Order | None, display: Display) -> Turn | None:
    turn = entrant.turn(order)
    display.end_turn(entrant.name, gone=turn is None)
    return turn


def _time(racing: list[Entrant], rules: Rules, display: Display, name: str | None) -> tuple[list[Entrant], Finish]:
    """Times rounds of blocks until the rules say that it is enough; returns the entrants that are left."""
    _show(racing, 0, math.inf, 0.0, rules, display)
    from mpcompare.race import intervals  # scipy is slow to import, and --help imports this file

    start = time.monotonic()
    blocks: dict[int, list[float]] = {id(entrant): [] for entrant in racing}

    def widest() -> float:
        times = [blocks[id(entrant)] for entrant in racing]
        if len(times) == 1:
            return intervals.interval(times[0]).half_width
        return max((intervals.ratio(a, b).half_width for a, b in itertools.combinations(times, 2)), default=math.inf)

    look, half_width = MIN_ROUNDS, math.inf
    for rounds in itertools.count(1):
        order = Time(rounds, _UNFORESEEN.getrandbits(32))
        for entrant in _order(racing, rounds):
            if turn := _turn(entrant, order, display):
                blocks[id(entrant)].append(turn.step_ms)
            else:
                racing = [other for other in racing if other is not entrant]
        seconds = time.monotonic() - start
        done = not racing or seconds * (rounds + 1) / rounds > rules.budget_s  # another would end too late
        if racing and (done or rounds == look):
            half_width = widest()
            done |= half_width <= rules.rel_ci
            look = _next_look(rounds, half_width, rules.rel_ci)
        _show(racing, rounds, half_width, seconds, rules, display)
        if done:
            stopped = "rel_ci" if half_width <= rules.rel_ci and rounds >= MIN_ROUNDS else "budget"
            finish = Finish(rounds, stopped, half_width, seconds, name if len(racing) > 1 else None)
            break
    if racing:
        display.line(describe_timing(asdict(finish)))
    return racing, finish


def _order(racing: Sequence[Entrant], rounds: int) -> list[Entrant]:
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
    racing: Sequence[Entrant], rounds: int, half_width: float, seconds: float, rules: Rules, display: Display
) -> None:
    known = f", known within {half_width:.1%}" if half_width < math.inf else ""
    for entrant in racing:
        taken = f"{rounds} round{'s' if rounds != 1 else ''} of blocks"
        text = f"{taken}{known}, {seconds:.0f} of {rules.budget_s:g} s at most"
        display.progress(entrant.name, Progress(min(seconds, rules.budget_s), rules.budget_s, text, TIMING))


def describe_timing(finish: dict[str, object]) -> str:
    """Returns a :class:`Finish`, as a record holds it, in words."""
    rounds, half_width = finish["rounds"], float(str(finish["half_width"]))
    what = "every ratio" if finish["race"] else "the step time"
    why = "narrow enough" if finish["stopped"] == "rel_ci" else "the time budget ended (measure.budget_s)"
    known = f"{what} is known within {half_width:.1%} (95 %)" if half_width < math.inf else "too few for an interval"
    return f"{rounds} round{'s' if rounds != 1 else ''} of blocks, stopped because {why}: {known}"
