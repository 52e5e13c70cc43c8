"""Ctrl-C and SIGTERM end a block, and wait where one must be whole."""

import os
import signal
import threading
from argparse import ArgumentParser
from contextlib import suppress
from importlib import import_module

import pytest

from mpcompare.command.verbs import PROGRAMS
from mpcompare.interrupt import SIGNALS, ends_when_interrupted, interruptible, uninterrupted


@pytest.fixture(autouse=True)
def handlers():
    """Each test begins with Python's own handlers, and leaves pytest's handlers."""
    before = [signal.getsignal(number) for number in SIGNALS]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def arrive(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_library_cannot_turn_an_interrupt_into_an_error_of_its_own(number):
    def import_of_a_library():
        try:
            arrive(number)
        except KeyboardInterrupt:
            raise ImportError("initialization failed") from None

    with pytest.raises(KeyboardInterrupt), interruptible():
        import_of_a_library()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("program", PROGRAMS)
def test_ctrl_c_ends_a_program_with_one_line(monkeypatch, capsys, program):
    monkeypatch.setattr(ArgumentParser, "parse_args", lambda *_: arrive(signal.SIGINT))
    with pytest.raises(SystemExit) as ended:
        import_module(f"mpcompare.{program}.__main__").main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "mpcompare: interrupted; what was finished is written\n"


def test_the_line_ends_with_how_to_go_on(capsys):
    with pytest.raises(SystemExit), ends_when_interrupted():
        raise KeyboardInterrupt("go on so")
    assert capsys.readouterr().err == "mpcompare: interrupted; what was finished is written; go on so\n"


def test_an_error_stays_an_error_where_nothing_arrived():
    with pytest.raises(ImportError), interruptible():
        raise ImportError


@pytest.mark.parametrize("number", SIGNALS)
def test_an_interrupt_waits_for_the_block(number):
    waited = False
    with pytest.raises(KeyboardInterrupt), interruptible():  # noqa: PT012 - the line after the signal must run
        try:
            with uninterrupted():
                arrive(number)
                waited = True
        except KeyboardInterrupt:
            raise ImportError from None
    assert waited


def test_an_ignored_signal_stays_ignored():
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    with interruptible(), uninterrupted():
        for number in SIGNALS:
            arrive(number)
    assert {signal.getsignal(number) for number in SIGNALS} == {signal.SIG_IGN}


def test_another_thread_changes_no_handler():
    seen = []

    def look():
        with interruptible(), uninterrupted(), suppress(KeyboardInterrupt):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
