"""A run whose examination stops loses its verdict, and nothing else."""

import json

import pytest
from support.entrants import AT_START, PLAN, turn
from support.plans import replan
from support.records import write_run

from mpcompare.entrant import examination
from mpcompare.entrant.entrant import compete
from mpcompare.fields import ExaminedRecord
from mpcompare.race.orders import Train
from mpcompare.records import NUMERICS, RunRecorder
from mpcompare.report.runs import read_run
from mpcompare.report.verdicts import judge_run

ERRORS = {
    MemoryError(): "out of memory, try a smaller task.batch_size or task.model (MemoryError:)",
    ArithmeticError("no oracle\nat all"): "ArithmeticError: no oracle",
}


@pytest.mark.parametrize(("error", "said"), ERRORS.items(), ids=str)
def test_the_run_goes_on_without_a_verdict(error, said, tmp_path, monkeypatch):
    def stops(*_):
        yield from ()
        raise error

    monkeypatch.setattr(examination, "examine", stops)
    entrant = compete(replan(PLAN, verdict={"enabled": True}), RunRecorder(tmp_path, AT_START))
    turn(entrant, None)
    turn(entrant, Train())
    assert json.loads((tmp_path / "result.json").read_text())["examine_stopped"] == said
    assert not (tmp_path / NUMERICS).exists()


def test_its_verdict_says_why(tmp_path):
    for backend, stopped in (("amp", "out of memory"), ("mine", "")):
        part = ExaminedRecord(1.0, None, None, examine_refused="", examine_stopped=stopped)
        write_run(tmp_path / backend, backend, module_dtypes={}, **vars(part))
    amp, mine = read_run(tmp_path / "amp"), read_run(tmp_path / "mine")
    assert str(judge_run(amp, amp)) == str(judge_run(mine, amp)) == "not examined: examination"
    assert judge_run(amp, amp).because == "the examination stopped: out of memory"
    assert judge_run(mine, amp).because == "the examination of the reference stopped: out of memory"
