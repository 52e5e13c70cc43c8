"""Ctrl-C, kept out of the few places where it would do harm."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the block is done: a row is written once and whole, a profiler is started or not.

    So does SIGTERM where it raises KeyboardInterrupt, as in the processes of a sweep. Nothing changes where neither
    would: in another thread, or where they are ignored.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    raising = [
        number
        for number in (signal.SIGINT, signal.SIGTERM)
        if in_main_thread and signal.getsignal(number) is signal.default_int_handler
    ]
    arrived: list[int] = []
    try:
        for number in raising:
            signal.signal(number, lambda number, _: arrived.append(number))
        yield
    finally:
        for number in raising:
            signal.signal(number, signal.default_int_handler)
        if arrived:
            raise KeyboardInterrupt


@contextmanager
def sigterm_is_ctrl_c() -> Iterator[None]:
    """SIGTERM, which ends a job of a batch system, raises KeyboardInterrupt; nothing changes in another thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
