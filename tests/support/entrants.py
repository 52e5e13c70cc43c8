"""A small plan, and the turns of an entrant that has it."""

import time

from support.plans import SMALL_PLAN, replan

from mpcompare.backends.fp32 import Fp32
from mpcompare.race.orders import Conclude, Prepare, Progress, Time
from mpcompare.tasks.fingerprint import fingerprint

STARTS = []


class Recording(Fp32):
    """``fp32`` that records the weights and the batch of its first step."""

    def forward(self, x, y):
        if not hasattr(self, "begun"):
            self.begun = True
            STARTS.append((fingerprint(self.master_params()), x.sum().item()))
        return super().forward(x, y)


def turn(turns, order):
    """Takes one turn. Returns the event at its end."""
    event = turns.send(order)
    while isinstance(event, Progress):
        event = next(turns)
    return event


def block(turns, number, seed):
    """Times one block as a race does, all of it with one seed. Returns the event at the end of its clock."""
    turn(turns, Prepare(seed))
    turn(turns, Time(number, seed))
    start = time.monotonic()
    event = turn(turns, None)
    turn(turns, Conclude(*2 * [time.monotonic() - start]))
    return event


class Local:
    """An entrant of a race in this process."""

    name = "run"

    def __init__(self, turns):
        self.turns = turns

    def turn(self, order):
        try:
            return turn(self.turns, order)
        except StopIteration:
            return None


class Unseen:
    """A display that shows nothing."""

    def progress(self, *_, **__):
        pass

    end_turn = line = progress


PLAN = replan(SMALL_PLAN, make_backend=Recording)
AT_START = {"backend": "fp32", "config": {}}
