"""Timed blocks, as their records tell of them."""

import math
from dataclasses import replace

import pandas as pd
import pytest
from support.judging import dataset_of, examined
from support.records import result_of
from support.tasks import make_task

from mpcompare.backends.amp import Amp
from mpcompare.fields import Distance, Timing
from mpcompare.promises import Promises
from mpcompare.report.verdicts import judge_run
from mpcompare.tasks.optimizers import Adam

TASK = make_task(in_features=30, hidden=[24], batch_size=64, samples=640)
BLOCK = {
    "timed_loss": 1.0, "timed_loss_difference": 0.0, "timed_state": {}, "timed_steps": 100, "timed_unfinished": 0,
    "timing": Timing(1, "rel_ci", 0.0, 1.0, "r", compared=1),
}  # fmt: skip
BLOCKS = pd.DataFrame([{"round": 1, "steps": 1, "step_ms": 1.0, "seen_s": 1e-3, "longest_s": 1e-3, "messages_s": 0.0}])
CLOCK = ["weights after the clock stopped", "time of the compared block"]


def run_of(task, precision="bf16", noise=2):
    return examined("amp", Amp, task, dataset_of(task), precision, steps=4, noise=noise)


@pytest.fixture(scope="module")
def run():
    return run_of(TASK)


def checks(run, **timed):
    """Returns the checks of timed steps of a run with this record, by their names."""
    blocks = run.blocks if len(run.blocks) else BLOCKS
    compared = result_of(**{**BLOCK, **timed}).compared
    recorded = replace(run, result=replace(run.result, compared=compared), blocks=blocks)
    verdict = judge_run(recorded, recorded)
    return {check.name: check for check in verdict.checks if check.kind == "timed steps"}


def apart(difference, moved=1.0, norm=10.0):
    return {"timed_state": {"weights": Distance(difference, moved, norm)}}


@pytest.mark.slow
def test_weights_are_as_far_apart_as_roundings_of_their_updates_may_move_them(run):
    check = checks(run, **apart(0.02))["weights after timed steps"]
    assert check.limit == pytest.approx(8 * 2**-8 + 10 * 2**-24 * 10)
    assert check.passed
    failed = checks(run, **apart(0.04))["weights after timed steps"]
    assert (failed.passed, failed.cause) == (False, "timed steps")
    assert "4.0e-02 away from weights of the examined backend" in failed.because


@pytest.mark.slow
def test_fp16_is_finer_and_updates_of_adam_may_turn():
    assert checks(run_of(TASK, "fp16", 0), **apart(0.0))["weights after timed steps"].limit == pytest.approx(
        8 * 2**-11 + 100 * 2**-24
    )
    adam = run_of(replace(TASK, optimizer=Adam(lr=0.01)), noise=0)
    limit = checks(adam, **apart(0.0, norm=0.0))["weights after timed steps"].limit
    assert limit == pytest.approx(2 * (8 * 2**-8) ** 0.5)


def test_a_block_whose_weights_did_not_wait_for_the_clock_is_found(run):
    check = checks(run, timed_unfinished=2)["weights after the clock stopped"]
    assert (check.passed, check.cause) == (False, "unfinished steps")
    assert "in 2 timed blocks" in check.because


def clocked(run, own_ms, seen_ms, late_ms=0.0, messages_ms=0.0, compared=1):
    """Returns the checks of blocks of one step that took ``own_ms`` and ``seen_ms`` by the two clocks. The race heard
    of their beginning ``late_ms`` later, and the entrant says that messages took ``messages_ms``."""
    own_ms = [own_ms] * 8 if isinstance(own_ms, float) else own_ms
    rows = [
        {
            "round": number,
            "steps": 1,
            "step_ms": ms,
            "seen_s": seen_ms / 1e3,
            "longest_s": (seen_ms + late_ms) / 1e3,
            "messages_s": messages_ms / 1e3,
        }
        for number, ms in enumerate(own_ms, start=1)
    ]
    timed = replace(run, blocks=pd.DataFrame(rows))
    return checks(timed, timing=replace(BLOCK["timing"], compared=compared))


def test_the_clock_of_a_process_is_held_against_that_of_the_race(run):
    check = clocked(run, own_ms=100.0, seen_ms=102.0)["clock of timed blocks"]
    assert (check.value, check.limit) == (pytest.approx(2.0), pytest.approx(0.02 * 102 + 1))
    assert check.passed
    for seen_ms, rate in ((196.0, "0.51"), (50.0, "2.00")):
        failed = clocked(run, own_ms=100.0, seen_ms=seen_ms)["clock of timed blocks"]
        assert (failed.passed, failed.cause) == (False, "clock")
        assert f"says {rate} of the time that the race saw" in failed.because


def test_messages_that_come_late_accuse_no_clock(run):
    """On a full machine the race heard 70 ms late that a block began, or 30 ms late that it was over."""
    for late in ({"seen_ms": 30.0, "late_ms": 70.0}, {"seen_ms": 130.0, "messages_ms": 30.0}):
        check = clocked(run, own_ms=100.0, **late)["clock of timed blocks"]
        assert check.passed
        assert check.value == 0


def test_a_clock_that_goes_wrong_in_most_blocks_is_found_and_few_blocks_tell_nothing(run):
    assert not clocked(run, own_ms=[100.0] * 3 + [50.0] * 5, seen_ms=100.0)["clock of timed blocks"].passed
    assert "clock of timed blocks" not in clocked(run, own_ms=[50.0] * 5, seen_ms=100.0)


def test_the_block_that_was_compared_is_not_a_slow_one(run):
    times = [1.0, 2.0, 3.0, 4.0]
    found = [clocked(run, times, 1.0, compared=number)["time of the compared block"] for number in (1, 2, 3)]
    assert [check.value for check in found] == [0.4, 0.8, 1.2]
    assert [check.passed for check in found] == [True, True, False]
    assert found[2].cause == "timed steps"


def test_nothing_is_said_where_two_correct_runs_may_part(run):
    at_random = replace(run, findings=replace(run.findings, promises=Promises(weights="bf16", rounding="stochastic")))
    assert list(checks(at_random, **apart(9.0))) == CLOCK
    noise = [replace(again, losses=[2 * loss for loss in again.losses]) for again in run.findings.noise]
    parted = replace(run, findings=replace(run.findings, noise=noise))
    assert "weights after timed steps" not in checks(parted, **apart(9.0))
    assert "weights after timed steps" not in checks(run, **apart(math.nan, moved=math.nan))
    assert checks(run, **apart(math.nan))["weights after timed steps"].passed is False
    assert "loss of timed steps" not in checks(run, timed_loss=math.nan, timed_loss_difference=math.nan)
