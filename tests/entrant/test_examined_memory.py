"""The memory of an examination is recorded."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from support.entrants import AT_START, PLAN, turn
from support.plans import replan
from support.records import result_of

from mpcompare.entrant import examination
from mpcompare.entrant.entrant import compete
from mpcompare.entrant.state import ExaminedMemory
from mpcompare.race.orders import Train
from mpcompare.records import RunRecorder
from mpcompare.report.verdicts import judge_run


@pytest.mark.slow
def test_the_record_says_what_an_examination_took(tmp_path):
    entrant = compete(replan(PLAN, verdict={"enabled": True}), RunRecorder(tmp_path, AT_START))
    turn(entrant, None)
    turn(entrant, Train())
    result = json.loads((tmp_path / "result.json").read_text())
    for size in (result["examine_peak_bytes"], result["examine_foretold_bytes"]):
        assert size is None or size >= 0
    assert result["examine_refused"] == ""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is foretold")
def test_an_examination_that_would_not_fit_does_not_begin(tmp_path, monkeypatch):
    monkeypatch.setattr(examination, "foretold", lambda *_: 10**15)
    entrant = compete(replan(PLAN, verdict={"enabled": True}), RunRecorder(tmp_path, AT_START))
    turn(entrant, None)
    turn(entrant, Train())
    entrant.close()
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["examine_foretold_bytes"] == 10**15
    assert result["examine_stopped"] == ""
    assert not (tmp_path / "numerics.json").exists()
    run = SimpleNamespace(name="run", findings=None, result=result_of(**result))
    verdict = judge_run(run, run)
    assert str(verdict) == "not examined: memory"
    assert "it needs 1e+06 GB more" in verdict.because
    assert "are left: a smaller task.batch_size or task.model needs less" in verdict.because
    assert "verdict.enabled=false" in verdict.because


def test_the_peak_is_what_was_taken_beyond_the_beginning():
    memory = ExaminedMemory(None)
    memory.begin()
    if memory.rest is None:  # elsewhere than on Linux
        return
    before = memory.peak()
    held = torch.ones(50_000_000)
    assert memory.peak() - before > 0.9 * held.nbytes
