"""The order of turns and the end of timing, with entrants that only pretend to compute."""

import itertools
import math
import time
from dataclasses import replace

import numpy as np
import pytest

from mpcompare.errors import InputError
from mpcompare.race.orders import Conclude, Finish, Prepare, Time, Train, Turn
from mpcompare.race.turns import Rules, _drawn, describe_timing, race


class Board:
    def __init__(self):
        self.lines = []

    def progress(self, name, progress):
        pass

    def end_turn(self, name, gone):
        pass

    def line(self, text):
        self.lines.append(text)


class Pretender:
    """An entrant whose steps take ``step_ms(round)``. It is gone once told ``gone``, an order's type or a round."""

    def __init__(self, name, log, step_ms=lambda round_: 1.0, gone="never"):
        self.name, self.log, self.step_ms, self.gone = name, log, step_ms, gone
        self.finish, self.order, self.told = None, None, []

    def turn(self, order):
        if isinstance(order, (Prepare, Conclude)):
            self.told.append([order, None])
            return Turn()
        if isinstance(order, Time):
            self.order, self.told[-1][1] = order, order.seed
            return Turn(goes_on=True)
        order = order or self.order
        self.log.append((self.name, order.round if isinstance(order, Time) else type(order).__name__))
        if self.gone in (type(order), getattr(order, "round", 0)):
            return None
        if isinstance(order, Finish):
            self.finish = order
            return None
        return Turn(self.step_ms(order.round) if isinstance(order, Time) else math.nan)


RULES = Rules(rel_ci=0.02, budget_s=30, block_s=0.1)


def test_turns_rotate_so_that_nobody_always_follows_the_same_one():
    log = []
    entrants = [Pretender(name, log) for name in "abc"]
    race(entrants, RULES, Board(), "r")
    assert log[:6] == [("a", "NoneType"), ("b", "NoneType"), ("c", "NoneType"), *((n, "Train") for n in "abc")]
    rounds = [[n for n, number in log if number == r] for r in range(1, 11)]
    assert rounds[:5] == [list("bca"), list("cab"), list("cba"), list("acb"), list("bac")]
    for one, other in itertools.permutations("abc", 2):
        assert sum(order.index(one) < order.index(other) for order in rounds[:6]) == 3
    assert log[-3:] == [(n, "Finish") for n in "abc"]
    assert replace(entrants[0].finish, compared=0) == replace(entrants[2].finish, compared=0)
    assert (entrants[0].finish.rounds, entrants[0].finish.stopped) == (10, "rel_ci")  # ten equal ratios are enough
    assert entrants[0].finish.half_width == 0


def test_the_batches_of_a_round_are_drawn_anew_and_said_when_the_block_begins():
    entrants = [Pretender(name, []) for name in "ab"]
    race(entrants, RULES, Board(), "r")
    prepared, timed = zip(
        *((order, seed) for order, seed in entrants[0].told if isinstance(order, Prepare)), strict=True
    )
    assert timed == tuple(seed for order, seed in entrants[1].told if isinstance(order, Prepare))
    assert len({*timed, *(order.seed for order in prepared)}) == 20


@pytest.mark.slow
def test_the_race_looks_at_its_own_clock_while_a_block_runs():
    class Sleeper(Pretender):
        def turn(self, order):
            if order is None:
                time.sleep(0.02)
            if isinstance(order, (Prepare, Time, Conclude)):
                time.sleep(0.05)  # before the clock starts, and after it has stopped
            return super().turn(order)

    sleeper = Sleeper("a", [])
    race([sleeper], RULES, Board())
    told = [order for order, _ in sleeper.told if isinstance(order, Conclude)]
    assert len(told) == 10
    assert 0.02 <= min(order.seen_s for order in told) < 0.05
    assert all(order.longest_s >= order.seen_s + 0.05 for order in told)  # from the order to time it


def test_the_compared_block_is_drawn_from_the_faster_half():
    times = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert {_drawn(times) for _ in range(200)} == {2, 4, 5}
    assert {_drawn([1.0] * 3) for _ in range(200)} == {1, 2, 3}


def test_timing_goes_on_until_the_widest_interval_is_narrow():
    noise = itertools.cycle([0.8, 1.25, 1.0, 0.9, 1.1])
    log = []
    entrants = [Pretender("a", log), Pretender("b", log, lambda _: next(noise)), Pretender("c", log)]
    race(entrants, RULES, Board(), "r")
    finish = entrants[0].finish
    assert finish.stopped == "rel_ci"
    assert finish.rounds > 20
    assert finish.half_width <= 0.02


@pytest.mark.slow
def test_the_budget_ends_it_and_says_so():
    noise = np.random.default_rng(0)
    board, entrant = Board(), Pretender("a", [], lambda _: noise.lognormal())
    race([entrant], Rules(rel_ci=0.001, budget_s=0.3, block_s=0.1), board)
    assert entrant.finish.stopped == "budget"
    assert entrant.finish.half_width > 0.001
    assert "the time budget ended (measure.budget_s): the step time is known within" in board.lines[-1]


def test_who_trained_is_told_before_the_next_one_trains():
    log = []
    entrants = [Pretender("a", log), Pretender("lost", log, gone=Train), Pretender("b", log)]
    race(entrants, RULES, Board(), "r", trained=lambda name: log.append((name, "told")))
    assert log[3:8] == [("a", "Train"), ("a", "told"), ("lost", "Train"), ("b", "Train"), ("b", "told")]


@pytest.mark.parametrize("gone", [type(None), Train, 3, Finish])
def test_one_that_is_gone_does_not_stop_the_others(gone):
    log = []
    lost = Pretender("lost", log, gone=gone)
    others = [Pretender(name, log) for name in "ab"]
    race([others[0], lost, others[1]], RULES, Board(), "r")
    assert [other.finish.rounds for other in others] == [10, 10]
    assert sum(entry == ("lost", 4) for entry in log) == (gone is Finish)


def test_a_race_that_everybody_left_ends():
    race([Pretender("a", [], gone=2), Pretender("b", [], gone=Train)], RULES, Board(), "r")


def test_timing_is_described_by_what_was_found():
    finish = Finish(12, "rel_ci", half_width=0.013, seconds=9.0, race="r", compared=1)
    assert describe_timing(finish) == (
        "12 rounds of blocks, stopped because narrow enough: every ratio of two runs is known within 1.3 % (95 %)"
    )


@pytest.mark.parametrize("wrong", [{"rel_ci": 0}, {"rel_ci": "x"}, {"budget_s": -1}, {"block_s": math.nan}])
def test_wrong_rules_are_named(wrong):
    with pytest.raises(InputError, match=f"measure.{next(iter(wrong))}="):
        Rules(**{"rel_ci": 0.02, "budget_s": 1, "block_s": 0.1, **wrong})
