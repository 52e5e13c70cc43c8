"""Streams that are lost, and do not end the program: a closed pipe, a full disk, a terminal that is gone."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

STANDARD = (0, 1, 2)  # stdin, stdout and stderr


@contextmanager
def lasting() -> Iterator[None]:
    """Lets the program go on to its end where stdout or stderr is lost, and without a terminal: what is said then goes
    nowhere, and files are written as ever.

    A stream that was closed from the start is opened on nothing, so that no file of ours gets its number.
    """
    for number in STANDARD:
        try:
            os.fstat(number)
        except OSError:
            _open_on_nothing(number)
    before, hung_up = (sys.stdout, sys.stderr), signal.getsignal(signal.SIGHUP)
    if hung_up is signal.SIG_DFL:  # a program that is started here inherits SIG_IGN, and inherits no handler
        signal.signal(signal.SIGHUP, lambda *_: None)
    with Path(os.devnull).open("w") as nothing:
        sys.stdout, sys.stderr = (_Lasting(stream or nothing) for stream in before)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            sys.stdout, sys.stderr = before
            signal.signal(signal.SIGHUP, hung_up)


class _Lasting:
    """A stream that does what another does, and writes into nothing from its first error on."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except UnicodeEncodeError as error:
            self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except OSError:
            self._lose()
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._lose()

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def _lose(self) -> None:
        """Lets the stream write into nothing: the text that it still holds, and all that others write to its number."""
        with suppress(OSError, ValueError):
            _open_on_nothing(self._stream.fileno())
            self._stream.flush()


def _open_on_nothing(number: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    if nothing != number:
        os.dup2(nothing, number)
        os.close(nothing)
    os.set_inheritable(number, True)
