"""The source of the processes of entrants: forks of a server that has imported torch (``preload.py``).

The server is a new program, so only the environment of the launcher gets into it. It ends with the ``with`` block, or
with the launcher.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import context, forkserver, get_context, process, resource_tracker
from typing import Any

import psutil

# Ctrl-C in a terminal, its end, and the signals that end a job of a batch system, or announce its end, go to all
# processes. Only the launcher shall hear them.
HELD_BACK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

PRELOAD = ["mpcompare.command.preload"]


@contextmanager
def fork_server(fork: bool = True) -> Iterator[context.BaseContext]:
    """Makes processes in which ``HELD_BACK`` are blocked at first, with the environment that the launcher has now.

    Args:
        fork: False if processes are to load their libraries anew, as they must where their environments differ.

    Yields:
        The ``multiprocessing`` context to take processes and pipes from; start them with :func:`start`.
    """
    resource_tracker.ensure_running()  # it unblocks the signals of the process that starts it
    if not fork or sys.platform != "linux":  # macOS's own libraries start threads when they are loaded
        yield get_context("spawn")
        return
    forks = get_context("forkserver")
    forks.set_forkserver_preload(PRELOAD)
    try:
        with _held_back():
            forkserver.ensure_running()
        yield forks if _has_imported(forks) else get_context("spawn")
    finally:  # a server that lived on would hand its old environment to the next sweep of this process
        server: Any = forkserver._forkserver
        if server._forkserver_pid is not None:
            os.kill(server._forkserver_pid, signal.SIGKILL)
            server._stop()


def start(new: process.BaseProcess) -> None:
    """Starts a process of a :func:`fork_server`."""
    with _held_back():  # a fork has the server's mask, a new program the launcher's
        new.start()


def server_has_died() -> bool:
    """Returns whether the server was killed: then nobody knows how a fork of it ended."""
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid is not None and bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def _has_imported(forks: context.BaseContext) -> bool:
    """Waits for the server; returns False if it died, of a torch that is broken, say. Spawned entrants record why."""
    first = forks.Process(target=int)  # type: ignore[attr-defined]  # ends at once
    try:
        first.start()
    except (EOFError, OSError):
        return False
    first.join()
    return True


@contextmanager
def _held_back() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
