"""Ctrl-C and SIGTERM: what they stop, and the few places out of which they are kept."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)  # SIGTERM ends a job of a batch system
KEPT = (signal.SIG_IGN, None)  # handlers that stay: a signal is ignored, or a program around Python handles it


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C and SIGTERM end the block with KeyboardInterrupt, whatever a library makes of them.

    A library that is being imported may turn a KeyboardInterrupt into an error of its own. Nothing changes in another
    thread, nor for a signal that is ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        signal.default_int_handler(number, frame)

    before = {number: handler for number in SIGNALS if (handler := signal.getsignal(number)) not in KEPT}
    try:
        for number in before:
            signal.signal(number, interrupt)
        yield
    except BaseException as error:
        if arrived and not isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ends_when_interrupted() -> Iterator[None]:
    """Ends the program with one line and exit code 130 where Ctrl-C or SIGTERM ends the block. The line ends with what
    the KeyboardInterrupt says: how to go on, say."""
    try:
        with interruptible():
            yield
    except KeyboardInterrupt as interrupt:
        said = ("mpcompare: interrupted", "what was finished is written", str(interrupt))
        print("; ".join(filter(None, said)), file=sys.stderr)
        sys.exit(130)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the block is done: a row is written once and whole, a profiler starts or does not.

    Nothing changes where neither would call a function: in another thread, or where they are ignored.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    handlers = {number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))}
    arrived: list[tuple[int, FrameType | None]] = []
    try:
        if in_main_thread:
            for number in handlers:
                signal.signal(number, lambda number, frame: arrived.append((number, frame)))
        yield
    finally:
        if in_main_thread:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        for first, frame in arrived[:1]:
            handlers[signal.Signals(first)](first, frame)
