"""The time that is left, from made-up times of stages."""

import pytest

from mpcompare.race import timetable
from mpcompare.race.timetable import Remaining, Timetable, stages

PLAN = {"train_steps": 10, "timing_s": 20, "block_s": 0.5, "inference_s": 2}


@pytest.fixture
def two():
    """Returns the timetable of two entrants. The second entrant trains again twice."""
    return Timetable({"a": stages(noise_runs=0, **PLAN), "b": stages(noise_runs=2, **PLAN)}, began=0.0)


def examined(two):
    """Takes ``a`` through a set-up of 30 s, ten steps of 0.4 s and an examination of 3 s."""
    two.go("a", timetable.SET_UP, 0, 1, now=0.0)
    two.go("a", timetable.TRAINING, 0, 10, now=30.0)
    for step in range(1, 11):
        two.go("a", "", step, 10, now=30.0 + 0.4 * step)
    two.go("a", timetable.EXAMINATION, 0, 1, now=34.0)
    two.end_turn("a", gone=False, now=37.0)


# The stages of one entrant after its examination: timing, nine blocks of phases, memory (not seen yet), inference.
FINISH = 20 + 9 * 0.5 + 0 + 2


def test_nothing_is_said_before_there_is_something_to_say_it_by(two):
    assert two.remaining(now=0.0) is None
    two.go("a", timetable.SET_UP, 0, 1, now=0.0)
    two.go("a", timetable.TRAINING, 0, 10, now=1.0)
    assert two.remaining(now=5.0) is None


def test_the_first_step_foretells_no_other(two):
    two.go("a", timetable.TRAINING, 0, 10, now=0.0)
    two.go("a", "", 1, 10, now=15.0)
    assert two.remaining(now=15.0) is None
    two.go("a", "", 3, 10, now=15.8)
    assert two.remaining(now=15.8).seconds == pytest.approx(7 * 0.4 + FINISH + 4 + 8 + FINISH)


def test_an_only_step_foretells_the_steps_of_others():
    plan = {**PLAN, "train_steps": 1}
    two = Timetable({"a": stages(noise_runs=0, **plan), "b": stages(noise_runs=0, **plan)}, began=0.0)
    two.go("a", timetable.TRAINING, 0, 1, now=0.0)
    two.go("a", "", 1, 1, now=3.0)
    two.go("a", timetable.EXAMINATION, 0, 1, now=3.0)
    assert two.remaining(now=3.0).seconds >= 3.0 + 2 * 20


def test_a_stage_that_nobody_has_shown_makes_it_a_least_time(two):
    two.go("a", timetable.TRAINING, 0, 10, now=0.0)
    two.go("a", "", 5, 10, now=2.0)
    # Steps of 0.4 s: five of a, ten of b, and its twenty of noise. An examination has not been seen.
    left = two.remaining(now=2.0)
    assert (left.seconds, left.is_least) == (pytest.approx(2 + FINISH + 4 + 8 + FINISH), True)
    assert str(left) == "at least 70 s left"


def test_what_was_seen_of_one_is_expected_of_the_other(two):
    examined(two)
    # b: ten steps, an examination like a's, and twenty steps of noise. The set-up is not expected again.
    assert two.remaining(now=37.0).seconds == pytest.approx(FINISH + 4 + 3 + 8 + FINISH)


def test_its_own_steps_count_more_than_the_steps_of_others(two):
    examined(two)
    two.go("b", timetable.SET_UP, 0, 1, now=37.0)
    two.go("b", timetable.TRAINING, 0, 10, now=38.0)
    two.go("b", "", 4, 10, now=42.0)  # a second each
    assert two.remaining(now=42.0).seconds == pytest.approx(FINISH + 6 + 3 + 20 + (20 + 9 * 1.0 + 0 + 2))
    two.go("b", timetable.EXAMINATION, 0, 1, now=48.0)
    assert two.remaining(now=50.0).seconds == pytest.approx(FINISH + (3 - 2) + 20 + 31)
    assert two.remaining(now=60.0).seconds == pytest.approx(FINISH + 0 + 20 + 31)  # it takes longer than the other's
    two.go("b", timetable.NOISE, 5, 20, now=60.0)
    assert two.remaining(now=65.0).seconds == pytest.approx(FINISH + 15 + 31)


def test_timing_takes_its_budget_and_what_is_over_is_over(two):
    examined(two)
    two.end_turn("b", gone=True, now=40.0)
    assert two.remaining(now=40.0).seconds == pytest.approx(FINISH)
    for now in (45.0, 50.0):
        two.go("a", timetable.TIMING, now - 40.0, 40.0, now)
        two.end_turn("a", gone=False, now=now)
        assert two.remaining(now).seconds == pytest.approx(20 * (1 - (now - 40.0) / 40.0) + FINISH - 20)
    two.go("a", timetable.PHASES, 0, 1, now=60.0)
    two.go("a", timetable.MEMORY, 0, 1, now=64.0)
    two.go("a", timetable.INFERENCE, 0, 1, now=65.0)
    assert two.remaining(now=66.0).seconds == pytest.approx(1.0)
    two.go("a", "", 1, 1, now=68.0)
    two.end_turn("a", gone=True, now=68.0)
    assert two.remaining(now=68.0).seconds == 0.0
    assert {mark for _, mark in two.marks("a")} == {"done"}


def test_one_that_ends_early_is_marked_where_it_ended(two):
    two.go("a", timetable.SET_UP, 0, 1, now=0.0)
    two.go("a", timetable.TRAINING, 0, 10, now=1.0)
    assert two.marks("a")[:3] == [("set-up", "done"), ("training", "now"), ("examination", "ahead")]
    two.end_turn("a", gone=True, now=2.0)
    assert two.marks("a")[:3] == [("set-up", "done"), ("training", "out"), ("examination", "out")]
    assert [mark for _, mark in two.marks("b")] == ["ahead"] * 8


def test_stages_are_those_that_were_asked_for():
    names = [stage.name for stage in stages(noise_runs=None, **{**PLAN, "inference_s": None})]
    assert names == ["set-up", "training", "examination", "timing", "phases", "memory"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (3, "about 10 s left"),
        (44, "about 40 s left"),
        (89, "about 90 s left"),
        (100, "about 2 min left"),
        (700, "about 12 min left"),
        (9000, "about 2.5 h left"),
    ],
)
def test_an_estimate_is_said_no_more_exactly_than_it_is(seconds, words):
    assert str(Remaining(seconds)) == words
