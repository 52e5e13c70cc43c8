"""Sweeps as a fair race: every job in a process of its own, one of them computing at any moment.

Jobs that differ only in how they compute (``HOW``) form one race and take turns; races run one after the other. The
process that launches imports no torch and uses no core while an entrant computes.
"""

import atexit
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, context
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from hydra import version
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobRuntime, JobStatus, configure_log, filter_overrides, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from mpcompare import records
from mpcompare.command.nursery import nursery, start
from mpcompare.command.plan import rules_of
from mpcompare.command.record import record_at_start
from mpcompare.errors import InputError, check_number, fail
from mpcompare.interrupt import uninterrupted
from mpcompare.race.progress import Board
from mpcompare.race.turns import Order, Progress, Rules, Turn, Turns, race

log = logging.getLogger(__name__)

# What the jobs of one race may differ in: how they compute, never what.
HOW = ("backend", "precision", "engine", "loss_scale")
GRACE_S = 3.0  # between being asked to stop and being killed
OUTPUT = "output.log"  # what an entrant's process prints beside its log


@dataclass(frozen=True)
class _Job:
    config: DictConfig
    overrides: list[str]
    name: str
    folder: Path
    record_at_start: dict[str, Any]


def launch(
    hydra: HydraContext,
    task: TaskFunction,
    config: DictConfig,
    job_overrides: Sequence[Sequence[str]],
    initial_job_idx: int,
    silence_limit_s: float,
) -> list[JobReturn]:
    """Runs the jobs of a sweep (``Launcher.launch``); how each ended is in its folder.

    Raises:
        InputError: before any has begun.
    """
    check_number("hydra.launcher.silence_limit_s", silence_limit_s, above=0)
    setup_globals()
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    jobs = [_job(hydra, config, initial_job_idx + i, list(overrides)) for i, overrides in enumerate(job_overrides)]
    for folder in (folders := [each.folder for each in jobs]):
        if folders.count(folder) > 1:
            raise InputError("hydra.sweep.subdir", folder.name, "expected a folder of its own for each job")
        records.check_unused("hydra.sweep.subdir", folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError("hydra.sweep.subdir", folder, f"cannot write there ({error.strerror})") from error
    races: dict[str, list[_Job]] = {}
    for each in jobs:
        races.setdefault(_what(each), []).append(each)
    limits = [rules_of(of[0].config) for of in races.values()]  # a wrong one ends the sweep before it began
    with nursery(fork=not any(each.config.hydra.job.env_set for each in jobs)) as processes:
        for i, of in enumerate(races.values()):
            log.info(f"Race {i + 1} of {len(races)}: {len(of)} taking turns")
            for each in of:
                log.info(f"\t{each.name} : {' '.join(filter_overrides(each.overrides))}")
            _race(of, hydra, task, limits[i], silence_limit_s, processes)
    return [_job_return(each) for each in jobs]


def _job(hydra: HydraContext, sweep_config: DictConfig, number: int, overrides: list[str]) -> _Job:
    config = hydra.config_loader.load_sweep_config(sweep_config, overrides)
    with open_dict(config):
        config.hydra.job.id = number
        config.hydra.job.num = number
    with _as_hydra_config(config):
        name = str(config.hydra.sweep.subdir)
        return _Job(
            config, overrides, name, Path(str(config.hydra.sweep.dir)) / name, record_at_start(_without_hydra(config))
        )


def _race(
    jobs: Sequence[_Job],
    hydra: HydraContext,
    task: Callable[..., None],
    rules: Rules,
    silence_limit_s: float,
    processes: context.BaseContext,
) -> None:
    entrants: list[_Process] = []
    with _sigterm_is_ctrl_c(), _shared_folder(jobs[0].folder.parent) as shared, Board([j.name for j in jobs]) as board:
        task = partial(task, shared=shared)
        try:
            for each in jobs:
                with uninterrupted():  # one that has started is in the list
                    entrants.append(_Process(each, hydra, task, silence_limit_s, board, processes))
            race(entrants, rules, board, uuid4().hex[:8])
        finally:
            with uninterrupted():
                for entrant in entrants:
                    entrant.ask_to_stop()
                deadline = time.monotonic() + GRACE_S
                for entrant in entrants:
                    entrant.end(deadline)
    if lost := [entrant.unrecorded for entrant in entrants if entrant.unrecorded]:
        raise lost[0]


def _without_hydra(config: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])


def _what(each: _Job) -> str:
    """All of a job's configuration but how it computes, as text."""
    config = each.record_at_start["config"]
    return repr({key: value for key, value in config.items() if key not in HOW})


@contextmanager
def _as_hydra_config(config: DictConfig) -> Iterator[None]:
    """Resolvers like ``hydra:runtime.choices`` read this global; :func:`run_job` sets it likewise."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before


@contextmanager
def _shared_folder(beside: Path) -> Iterator[Path | None]:
    """A folder for what the entrants of a race share (``shared.py``); None where none can be made."""
    try:
        folder = Path(tempfile.mkdtemp(dir=beside, prefix=".shared-"))
    except OSError as error:
        log.warning(f"the entrants of this race share nothing: {error}")
        yield None
        return
    try:
        yield folder
    finally:
        with uninterrupted():
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _sigterm_is_ctrl_c() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _job_return(each: _Job) -> JobReturn:
    """For Hydra's sweeper. A job that failed is a row of the report, not an exception that ends the sweep."""
    return JobReturn(
        overrides=each.overrides,
        cfg=_without_hydra(each.config),
        hydra_cfg=OmegaConf.masked_copy(each.config, ["hydra"]),
        working_dir=str(each.folder),
        task_name=str(each.config.hydra.job.name),
        status=JobStatus.COMPLETED,
        _return_value=None,
    )


class _Process:
    """An entrant in a process of its own, as the launcher sees it."""

    def __init__(
        self,
        each: _Job,
        hydra: HydraContext,
        task: Callable[..., None],
        silence_limit_s: float,
        board: Board,
        processes: context.BaseContext,
    ) -> None:
        self.job, self.name, self.board, self.silence_limit_s = each, each.name, board, silence_limit_s
        self.cause: str | None = None  # of its end, where the launcher brought it about
        self.unrecorded: InputError | None = None
        self.oom_kills = _oom_kills()
        self.pipe, theirs = processes.Pipe()
        arguments = (theirs, hydra, task, each.config, version.getbase(), each.folder / OUTPUT)
        self.process = processes.Process(target=_entrant, args=arguments, name=self.name)  # type: ignore[attr-defined]
        start(self.process)
        theirs.close()

    def turn(self, order: Order | None) -> Turn | None:
        """One turn; None where the process is gone."""
        if order is not None:
            with suppress(OSError):  # gone: the loop below sees it
                self.pipe.send(order)
        while True:
            if self._is_silent():
                self.cause = f"hung: no sign of life for {self.silence_limit_s:g} s (hydra.launcher.silence_limit_s)"
                self.process.kill()
                self.end()
                return None
            try:
                event = self.pipe.recv() if self.pipe.poll() else None
            except (EOFError, OSError):
                event = None
            if event is None:
                self.end()
                return None
            if isinstance(event, Turn):
                return event
            if isinstance(event, Progress):
                self.board.progress(self.name, event)
            else:
                self.board.say(self.name, *event)

    def _is_silent(self) -> bool:
        """Waits until the entrant says something or is gone; True if ``silence_limit_s`` pass without either."""
        waited = 0.0
        # In slices: a child of the entrant's may keep the pipe open when it is gone, and time in which Ctrl-Z stopped
        # both is no silence.
        while waited < self.silence_limit_s:
            slice_s = min(1.0, self.silence_limit_s - waited)
            if connection.wait([self.pipe, self.process.sentinel], slice_s) or not self.process.is_alive():
                return False
            waited += slice_s
        return True

    def ask_to_stop(self) -> None:
        """Like Ctrl-C; a process that is done already does not notice."""
        if self.process.is_alive():
            self.cause = "interrupted"
            self.process.terminate()

    def end(self, deadline: float | None = None) -> None:
        """Waits for the process to end, kills it if it has not by ``deadline``, and completes its record."""
        self.process.join(GRACE_S if deadline is None else max(deadline - time.monotonic(), 0))
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        try:
            output = self.job.folder / OUTPUT
            said = output.read_text(errors="replace").strip().splitlines() if output.exists() else []
            if not said:
                output.unlink(missing_ok=True)
            cause = self.cause or self._cause_of_death(said)
            if records.conclude(self.job.folder, self.job.record_at_start, cause):
                self.board.line(f"{self.name}: {cause}")
        except (OSError, ValueError) as error:
            self.unrecorded = InputError(
                "hydra output folder", self.job.folder, f"cannot complete the record ({error})"
            )

    def _cause_of_death(self, said: Sequence[str]) -> str:
        code = self.process.exitcode or 0
        named = {each.value: each.name for each in signal.Signals}
        cause = f"killed by {named.get(-code, f'signal {-code}')}" if code < 0 else f"ended with exit code {code}"
        if code == -signal.SIGKILL:
            out_of_memory = _oom_kills() > self.oom_kills
            cause += ": out of memory" + (", as the kernel was meanwhile" if out_of_memory else ", or by hand")
        elif said:
            cause += f": {said[-1]}"
        return cause


def _oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory; 0 where it does not say."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


# ---- in the entrant's process


def _entrant(
    pipe: connection.Connection,
    hydra_context: HydraContext,
    task: Callable[..., None],
    config: DictConfig,
    hydra_version: Any,
    output: Path,
) -> None:
    """Runs one job. What it prints goes to ``output``, so that one display has the terminal to itself."""
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    np.random.seed()  # forks begin in one state
    version.setbase(str(hydra_version))
    setup_globals()
    JobRuntime.instance().set("name", config.hydra.job.name)
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # the launcher's Ctrl-C
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
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


def _logged(task: Callable[..., None], pipe: connection.Connection, cfg: DictConfig) -> None:
    """The job, its log shown by the launcher (and, as always, in its folder)."""
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
            order = pipe.recv() if isinstance(event, Turn) else None
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
            self.pipe.send((level + self.format(record), record.levelno >= logging.ERROR))
