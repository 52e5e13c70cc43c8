"""The program of an entrant's process: one job, which takes its turns as the launcher orders them through a pipe."""

import atexit
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import connection, current_process
from pathlib import Path
from typing import Any

import numpy as np
from hydra import version
from hydra.core.utils import JobRuntime, run_job, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig

from mpcompare.command.belongings import ENTRANT
from mpcompare.command.folders import locked
from mpcompare.errors import InputError, fail
from mpcompare.interrupt import interruptible
from mpcompare.race.orders import Order, Turn, Turns

THREADS_S = 3.0  # for the threads of an entrant to end in


def main(
    pipe: connection.Connection,
    hydra_context: HydraContext,
    task: Callable[..., None],
    config: DictConfig,
    hydra_version: Any,
    output: Path,
) -> None:
    """Runs one job. Its prints go to ``output``, so that one display has the terminal to itself."""
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ[ENTRANT] = current_process().name
    np.random.seed()  # forks begin in one state
    version.setbase(str(hydra_version))
    setup_globals()
    JobRuntime.instance().set("name", config.hydra.job.name)
    with interruptible(), locked(output.parent, shared=True):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # the launcher's Ctrl-C
        try:
            ended = run_job(
                task_function=partial(_logged, task, pipe),
                config=config,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
                hydra_context=hydra_context,
            )
            assert ended.return_value is None  # raises what the job raised
        except KeyboardInterrupt:
            sys.exit(130)
        except InputError as error:
            fail(str(error))
        finally:
            atexit._run_exitfuncs()  # a fork ends without
            _leave_threads(pipe)


def _leave_threads(pipe: connection.Connection) -> None:
    """Ends the process if a thread of the backend's or the network's goes on, for which Python would wait for ever."""
    others = [each for each in threading.enumerate() if each is not threading.main_thread() and not each.daemon]
    deadline = time.monotonic() + THREADS_S
    for thread in others:
        thread.join(max(deadline - time.monotonic(), 0))
    if names := [thread.name for thread in others if thread.is_alive()]:
        with suppress(OSError):
            pipe.send((f"warning: ended while {', '.join(names)} went on, a thread that is no daemon", True))
        sys.stdout.flush()
        os._exit(0)


def _logged(task: Callable[..., None], pipe: connection.Connection, cfg: DictConfig) -> None:
    """Runs the job; the launcher shows its log, which is, as always, in its folder too."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if type(handler) is logging.StreamHandler:
            root.removeHandler(handler)
    root.addHandler(_ToLauncher(pipe))
    task(cfg, drive=partial(_answer, pipe))


def _answer(pipe: connection.Connection, turns: Turns) -> None:
    """Takes turns as the launcher says."""
    order: Order | None = None
    while True:
        try:
            event = turns.send(order)
        except StopIteration:
            return
        try:
            pipe.send(event)
            order = pipe.recv() if isinstance(event, Turn) and not event.goes_on else None
        except (EOFError, OSError):
            raise KeyboardInterrupt from None  # the launcher is gone: nobody is left to race for


class _ToLauncher(logging.Handler):
    """Sends log messages to the launcher."""

    def __init__(self, pipe: connection.Connection) -> None:
        super().__init__(logging.INFO)
        self.pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        with suppress(OSError):
            said = level + self.format(record), record.levelno >= logging.ERROR, getattr(record, "can_wait", False)
            self.pipe.send(said)
