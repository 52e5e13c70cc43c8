"""The memory of an examination is recorded."""

import json

import torch
from support.entrants import AT_START, PLAN, turn
from support.plans import replan

from mpcompare.entrant import examined_memory
from mpcompare.entrant.entrant import compete
from mpcompare.race.orders import Train
from mpcompare.records import Recorder


def test_the_record_says_what_an_examination_took(tmp_path):
    entrant = compete(replan(PLAN, verdict={"enabled": True}), Recorder(tmp_path, AT_START))
    turn(entrant, None)
    turn(entrant, Train())
    peak = json.loads((tmp_path / "result.json").read_text())["examine_peak_bytes"]
    assert peak is None or peak >= 0


def test_the_peak_is_what_was_taken_beyond_the_beginning():
    memory = examined_memory.Memory(None)
    memory.begin()
    if memory.rest is None:  # elsewhere than on Linux
        return
    before = memory.peak()
    held = torch.ones(50_000_000)
    assert memory.peak() - before > 0.9 * held.nbytes
