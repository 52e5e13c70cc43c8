"""The warden of a sweep: a process that ends with the sweep, however that ends, and removes what the sweep has left.

A launcher that is killed can clear up nothing. The warden waits at the other end of a pipe until the launcher has
closed it, or is gone. Then it ends every process that bears the sweep's mark, whoever started it, in whatever session,
and deletes the sweep's temporary folders. It is run as a file, so that it imports nothing but psutil.
"""

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

MARK = "MPCOMPARE_SWEEP"  # the variable of the environment; its value is the path of the sweep's temporary folder
SHARED = ".shared-"  # begins the names of folders elsewhere to which links in that folder lead, by the same names
LOCK = "lock"  # a file in that folder, locked as long as its sweep is there
GRACE_S = 3.0  # between being asked to end and being killed


def marked(folder: Path) -> Iterator[psutil.Process]:
    """Yields the processes of a sweep: processes that were started with its mark, and their forks."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK) == str(folder):
                yield process


def clear(folder: Path) -> None:
    """Ends the processes of a sweep and deletes its temporary folders: ``folder``, and those to which the sweep's own
    links lead. What other links lead to stays: an entrant has made them, and ``folder`` is its TMPDIR."""
    for process in (left := list(marked(folder))):
        with suppress(psutil.Error):
            process.terminate()
    psutil.wait_procs(left, timeout=GRACE_S)
    while left := list(marked(folder)):  # until none has started another meanwhile
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=GRACE_S)
    for link in folder.glob(f"{SHARED}*"):
        if (target := link.resolve()).name == link.name:
            shutil.rmtree(target, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Waits until the other end of stdin is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they go to all processes: the launcher hears them
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    clear(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
