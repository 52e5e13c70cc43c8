"""Sweeps as a fair race: every job in a process of its own, one of them computing at any moment.

The jobs of one race take turns; races run one after the other. The process that launches imports no torch and uses no
core while an entrant computes.
"""

import logging
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import context
from pathlib import Path
from uuid import uuid4

from hydra.core.utils import JobReturn, configure_log, filter_overrides, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from mpcompare.command.first_verdicts import FirstVerdicts
from mpcompare.command.nursery import nursery
from mpcompare.command.plan import rules_of
from mpcompare.command.process import GRACE_S, Process
from mpcompare.command.stages import stages_of
from mpcompare.command.sweep import Job, jobs_of, races_of
from mpcompare.errors import check_number
from mpcompare.interrupt import uninterrupted
from mpcompare.race.course import Course
from mpcompare.race.progress import Board
from mpcompare.race.turns import Rules, race

log = logging.getLogger(__name__)


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
    jobs = jobs_of(hydra, config, job_overrides, initial_job_idx)
    races = races_of(jobs)
    rules = [rules_of(entrants[0].config) for entrants in races]  # a wrong one ends the sweep before it began
    course = Course(
        {job.name: stages_of(job.config, job.record_at_start["backend"], len(race)) for race in races for job in race},
        time.monotonic(),
    )
    log.info("Importing torch, which takes some seconds")
    with nursery(fork=not any(job.config.hydra.job.env_set for job in jobs)) as processes:
        for i, entrants in enumerate(races):
            log.info(f"Race {i + 1} of {len(races)}: {len(entrants)} taking turns")
            for job in entrants:
                log.info(f"\t{job.name} : {' '.join(filter_overrides(job.overrides))}")
            which = f"race {i + 1} of {len(races)}" if len(races) > 1 else ""
            board = Board([job.name for job in entrants], course, before=which, after="then the report")
            _race(entrants, hydra, task, rules[i], silence_limit_s, processes, board)
    return [job.ended() for job in jobs]


def _race(
    jobs: Sequence[Job],
    hydra: HydraContext,
    task: Callable[..., None],
    rules: Rules,
    silence_limit_s: float,
    processes: context.BaseContext,
    board: Board,
) -> None:
    """Runs one race. However it ends, no process of it is left, and each job has a record.

    Raises:
        InputError: the record of a job could not be completed.
    """
    entrants: list[Process] = []
    with _sigterm_is_ctrl_c(), _shared_folder(jobs[0].folder.parent) as shared, board:
        task = partial(task, shared=shared)
        verdicts = FirstVerdicts(jobs, board)
        try:
            for job in jobs:
                with uninterrupted():  # one that has started is in the list
                    entrants.append(Process(job, hydra, task, silence_limit_s, board, processes))
            race(entrants, rules, board, uuid4().hex[:8], trained=verdicts.add)
        finally:
            with uninterrupted():
                for entrant in entrants:
                    entrant.ask_to_stop()
                deadline = time.monotonic() + GRACE_S
                for entrant in entrants:
                    entrant.end(deadline)
    if lost := [entrant.unrecorded for entrant in entrants if entrant.unrecorded]:
        raise lost[0]


@contextmanager
def _shared_folder(beside: Path) -> Iterator[Path | None]:
    """Makes a folder for the values that the entrants of a race share (``shared.py``); yields None if it cannot."""
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
