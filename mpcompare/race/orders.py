"""The messages between a race and its entrants. Nothing here knows processes or backends.

An entrant is a program that stops at the end of each of its turns and goes on when it is told to: a generator that
yields ``Turn`` and is sent an ``Order`` (``entrant/``), here or in a process of its own (``command/process.py``).

    order       the entrant's turn
    (start)     imports its libraries; all may do this at once
    Train       makes its backend, loads the data, trains, evaluates, is examined
    Prepare     makes a fresh backend, which takes its untimed steps
    Time        times one block of steps; once a round, in an order that rotates from round to round
    Conclude    looks at what the block left, and waits until its threads are idle
    Finish      times the phases, and measures memory and inference
"""

import math
from collections.abc import Generator
from dataclasses import dataclass

from mpcompare.fields import Timing


@dataclass(frozen=True)
class Train:
    pass


@dataclass(frozen=True)
class Prepare:
    """A block is to be prepared."""

    seed: int  # the seed of the untimed batches, and of torch's generators


@dataclass(frozen=True)
class Time:
    """A block is to be timed."""

    round: int  # its number, from 1
    # the seed of its batches, the same for every entrant of the round. The race draws it as the round begins, and says
    # it as the block begins, so that no entrant can compute anything of a block before its clock runs.
    seed: int


@dataclass(frozen=True)
class Conclude:
    """A block is over."""

    seen_s: float  # seconds by the clock of the race, from hearing that the block begins to hearing that it is over
    longest_s: float  # seconds by the clock of the race, from the order to time the block to hearing that it is over


@dataclass(frozen=True)
class Finish(Timing):
    """Timing is over."""


Order = Train | Prepare | Time | Conclude | Finish


@dataclass(frozen=True)
class Progress:
    """A step of progress to show; the turn goes on."""

    # done, total: the part of the stage that is done, and all of it
    done: float
    total: float
    text: str
    stage: str = ""  # the stage of the entrant (``race/timetable.py``); empty: the one that it is in already


@dataclass(frozen=True)
class Turn:
    """The end of a turn."""

    step_ms: float = math.nan  # milliseconds a step, where a block was timed
    text: str = ""  # a line to show
    # whether this is the moment in which the clock of a block starts: the entrant waits for no order, and the race
    # looks at its own clock
    goes_on: bool = False


Turns = Generator[Progress | Turn, Order | None, None]
