import io
import logging
import re
import sys
from pathlib import Path

import pytest
import rich.console

from mpcompare.race import progress, timetable
from mpcompare.race.orders import Progress
from mpcompare.race.timetable import Remaining, Timetable, stages

NAMES = ("0-amp", "1-fp32")


@pytest.fixture
def now(monkeypatch):
    """Returns a list of one number, the time in seconds."""
    moment = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: moment[0])
    return moment


@pytest.fixture
def screen(monkeypatch, now):
    """Returns a function that makes a board of two, with or without a terminal, and the stream that it prints to."""

    def make(terminal, width=80, **kwargs):
        out = io.StringIO()
        console = rich.console.Console(file=out, force_terminal=terminal, width=width, color_system=None)
        monkeypatch.setattr(progress.rich.console, "Console", lambda **_: console)
        each = stages(train_steps=10, noise_runs=1, timing_s=10, block_s=0.5, inference_s=None)
        folders = {name: Path(name) for name in NAMES}
        return progress.Board(folders, Timetable(dict.fromkeys(folders.values(), each), began=100.0), **kwargs), out

    return make


def last_drawn(out):
    """Returns the lines that were drawn last, without control codes."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "\x1b", out.getvalue()).split("\x1b")[-1].splitlines()


def through_training(board, now, name):
    """Takes an entrant through ten steps of a second each and an examination of 2 s."""
    board.progress(name, Progress(0, 1, "", timetable.SET_UP))
    board.progress(name, Progress(0, 10, "first step", timetable.TRAINING))
    now[0] += 10
    board.progress(name, Progress(10, 10, "10/10  loss 2.1"))
    board.progress(name, Progress(0, 1, "a backend that is loaded", timetable.EXAMINATION))
    now[0] += 2
    board.progress(name, Progress(0, 1, "run 1 of 1", timetable.NOISE))
    now[0] += 10
    board.end_turn(name, gone=False)


def test_a_line_that_can_wait_is_said_once_another_entrant_trains(screen, now):
    board, out = screen(terminal=False)
    with board:
        board.say("0-amp", "error: wrong", True, can_wait=True)
        board.progress("1-fp32", Progress(0, 1, "", timetable.SET_UP))
        assert out.getvalue() == ""
        board.progress("1-fp32", Progress(0, 10, "first step", timetable.TRAINING))
        board.say("0-amp", "error: as wrong", True, can_wait=True)
    assert out.getvalue().splitlines() == ["0-amp: error: wrong", "0-amp: error: as wrong"]


def test_a_terminal_shows_the_stages_of_each_and_the_time_that_is_left(screen, now):
    board, out = screen(terminal=True, after="then the report")
    with board:
        assert last_drawn(out)[2].endswith("time left not known yet, then the report")
        through_training(board, now, "0-amp")
        board.line("0-amp: trained")
        board.progress("1-fp32", Progress(0, 1, "", timetable.SET_UP))
        board.progress("1-fp32", Progress(0, 10, "first step", timetable.TRAINING))
        now[0] += 5
        board.progress("1-fp32", Progress(5, 10, "5/10  loss 2.1"))
        shown = last_drawn(out)
    assert shown[0].rstrip() == "0-amp  ✓ training ✓ examination   timing   phases   memory"
    assert shown[1].rstrip() == "1-fp32 ▸ training   examination   timing   phases   memory"
    # 5 steps, an examination of 2 s, 10 steps of noise; twice 10 s of timing and 9 steps of phases.
    assert shown[2].lstrip("━╸╺ ").rstrip() == "about 60 s left, then the report"
    assert shown[3].rstrip() == "training: 5/10  loss 2.1"
    assert "0-amp: trained" in out.getvalue()
    assert all(len(line) <= 80 for line in shown)


def test_a_long_name_is_cut_before_the_stages_are(screen, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "NAMES", ("0-amp", "4-mistake/unscales_each_micro_batch-auto"))
    board, out = screen(terminal=True, width=70)
    with board:
        first, second = last_drawn(out)[:2]
    assert second.startswith("4-mistake/")
    assert second.rstrip().endswith("…   training   examination   timing   phases   memory")
    assert first.index("training") == second.index("training")


def test_one_that_is_gone_is_seen_to_be(screen, now):
    board, out = screen(terminal=True)
    with board:
        board.progress("0-amp", Progress(0, 10, "first step", timetable.TRAINING))
        board.end_turn("0-amp", gone=True)
        board.line("0-amp: killed")
        assert last_drawn(out)[0].rstrip() == "0-amp  ✗ training ✗ examination ✗ timing ✗ phases ✗ memory"


def test_without_one_there_are_plain_lines_now_and_then(screen, now):
    board, out = screen(terminal=False, after="then the report")
    with board:
        for second in range(25):
            now[0] = 100.0 + second
            board.progress("0-amp", Progress(second, 25, f"step {second}", timetable.TRAINING))
    assert out.getvalue().splitlines() == [
        "0-amp: training: step 11; at least 70 s left, then the report",
        "0-amp: training: step 22; at least 70 s left, then the report",
    ]


def test_plain_lines_say_the_time_that_is_left_once_it_is_known(screen, now):
    board, out = screen(terminal=False, before="race 1 of 2", after="then the report")
    with board:
        through_training(board, now, "0-amp")
        board.line("0-amp: trained")
        now[0] += 1
        board.progress("1-fp32", Progress(0, 10, "first step", timetable.TRAINING))
        now[0] += 11
        board.progress("1-fp32", Progress(10, 10, "10/10"))
    assert out.getvalue().splitlines() == [
        "0-amp: noise: run 1 of 1; race 1 of 2, about 70 s left, then the report",
        "0-amp: trained",
        "1-fp32: training: first step; race 1 of 2, about 60 s left, then the report",
        "1-fp32: training: 10/10; race 1 of 2, about 60 s left, then the report",
    ]


def test_logs_to_a_terminal_are_written_above_what_is_drawn_there(screen, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    handler = logging.StreamHandler(terminal)
    logging.root.addHandler(handler)
    try:
        board, out = screen(terminal=True)
        with board:
            logging.getLogger("mpcompare.test").warning("a message")
        assert handler.stream is terminal
    finally:
        logging.root.removeHandler(handler)
    assert terminal.getvalue() == ""
    assert "a message\n" in out.getvalue()


def test_a_run_alone_is_silent_without_a_terminal(screen):
    board, out = screen(terminal=False, lines=False)
    with board:
        board.progress("0-amp", Progress(1, 2, "step", timetable.TRAINING))
        board.line("trained")
    assert out.getvalue() == ""


def test_what_all_say_is_said_once_but_for_errors(screen):
    board, out = screen(terminal=False)
    with board:
        for name in ("0-amp", "1-fp32"):
            board.say(name, "data=auto: using MNIST", is_error=False)
            board.say(name, "error: a bug", is_error=True)
    assert out.getvalue().splitlines() == [
        "0-amp: data=auto: using MNIST",
        "0-amp: error: a bug",
        "1-fp32: error: a bug",
    ]


def test_the_time_that_is_left_changes_by_whole_steps_of_its_words(screen, monkeypatch):
    board, _ = screen(terminal=True)
    shown = []
    for seconds in (84.0, 86.0, 84.0, 78.0, 86.0, 73.0, 78.0, 61.0, 100.0, 170.0, 110.0):
        monkeypatch.setattr(board.timetable, "remaining", lambda _, seconds=seconds: Remaining(seconds))
        shown.append(board._time_left(0.0))
    expected = [*["about 80 s left"] * 5, *["about 70 s left"] * 2, "about 60 s left"]
    assert shown == [*expected, *["about 60 s left"], "about 3 min left", "about 2 min left"]
