"""Sweeps as a fair race: every job in a process of its own, one of them computing at any moment.

The jobs of one race take turns; races run one after the other. The process that launches imports no torch and uses no
core while an entrant computes.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import context
from uuid import uuid4

from hydra.core.utils import JobReturn, configure_log, filter_overrides, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from mpcompare.command.belongings import Belongings, belongings
from mpcompare.command.first_verdicts import FirstVerdicts
from mpcompare.command.going_on import take_over
from mpcompare.command.nursery import nursery
from mpcompare.command.plan import rules_of
from mpcompare.command.process import GRACE_S, Process
from mpcompare.command.stages import stages_of
from mpcompare.command.sweep import Job, jobs_of, races_of
from mpcompare.errors import check_number
from mpcompare.interrupt import interruptible, uninterrupted
from mpcompare.race.course import Course
from mpcompare.race.progress import Board
from mpcompare.race.turns import race

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
    for entrants in races:
        rules_of(entrants[0].config)  # a wrong one ends the sweep before it began
    if finished := take_over(races):
        log.info(f"Finished before, and taken as they are: {', '.join(finished)}")
        races = [entrants for entrants in races if entrants[0].name not in finished]
    if not races:
        return [job.ended() for job in jobs]
    course = Course(
        {job.name: stages_of(job.config, job.record_at_start["backend"], len(race)) for race in races for job in race},
        time.monotonic(),
    )
    log.info("Importing torch, which takes some seconds")
    fork = not any(job.config.hydra.job.env_set for job in jobs)
    with belongings() as own, nursery(fork) as processes:
        for i, entrants in enumerate(races):
            log.info(f"Race {i + 1} of {len(races)}: {len(entrants)} taking turns")
            for job in entrants:
                log.info(f"\t{job.name} : {' '.join(filter_overrides(job.overrides))}")
            which = f"race {i + 1} of {len(races)}" if len(races) > 1 else ""
            board = Board([job.name for job in entrants], course, before=which, after="then the report")
            _race(entrants, hydra, task, silence_limit_s, processes, board, own)
    return [job.ended() for job in jobs]


def _race(
    jobs: Sequence[Job],
    hydra: HydraContext,
    task: Callable[..., None],
    silence_limit_s: float,
    processes: context.BaseContext,
    board: Board,
    own: Belongings,
) -> None:
    """Runs one race. However it ends, no process of it is left, and each job has a record.

    Raises:
        InputError: the record of a job could not be completed.
    """
    entrants: list[Process] = []
    with interruptible(), own.shared(jobs[0].folder.parent) as shared, board:
        task = partial(task, shared=shared)
        verdicts = FirstVerdicts(jobs, board)
        try:
            for job in jobs:
                with uninterrupted():  # one that has started is in the list
                    entrants.append(Process(job, hydra, task, silence_limit_s, board, processes, own))
            race(entrants, rules_of(jobs[0].config), board, uuid4().hex[:8], trained=verdicts.add)
        finally:
            with uninterrupted():
                for entrant in entrants:
                    entrant.ask_to_stop()
                deadline = time.monotonic() + GRACE_S
                for entrant in entrants:
                    entrant.end(deadline)
    if lost := [entrant.unrecorded for entrant in entrants if entrant.unrecorded]:
        raise lost[0]
