import io

import pytest
import rich.console

from mpcompare.race import progress
from mpcompare.race.turns import Progress


@pytest.fixture
def screen(monkeypatch):
    """Returns a function that makes a board of two, with or without a terminal, and the stream that it prints to."""

    def make(terminal, **kwargs):
        out = io.StringIO()
        console = rich.console.Console(file=out, force_terminal=terminal, width=100, color_system=None)
        monkeypatch.setattr(progress.rich.console, "Console", lambda **_: console)
        return progress.Board(["0-amp", "1-fp32"], **kwargs), out

    return make


def test_a_terminal_has_a_bar_for_each_and_lines_above(screen):
    board, out = screen(terminal=True)
    with board:
        board.progress("1-fp32", Progress(3, 23, "3/23  loss 2.1"))
        board.line("0-amp: trained")
        shown = out.getvalue()
    assert "waiting" in shown
    assert "3/23  loss 2.1" in shown
    assert "0-amp: trained" in shown


def test_without_one_there_are_plain_lines_now_and_then(screen, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    board, out = screen(terminal=False)
    with board:
        for second in range(25):
            now[0] = 100.0 + second
            board.progress("0-amp", Progress(second, 25, f"step {second}"))
    assert out.getvalue().splitlines() == ["0-amp: step 11", "0-amp: step 22"]


def test_a_run_alone_is_silent_without_a_terminal(screen):
    board, out = screen(terminal=False, lines=False)
    with board:
        board.progress("0-amp", Progress(1, 2, "step"))
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
