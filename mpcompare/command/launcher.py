"""Sweeps as a fair race: every job in a process of its own, one of them computing at any moment.

A sweep is planned, its races are run one after the other, and its report is drawn. The jobs of one race take turns. The
process that launches imports no torch and uses no core while an entrant computes.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import context
from pathlib import Path
from uuid import uuid4

from hydra.core.utils import JobReturn, configure_log, filter_overrides, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from mpcompare import records
from mpcompare.command import race_file
from mpcompare.command.belongings import Belongings, belongings
from mpcompare.command.faults import WRONG_INPUT
from mpcompare.command.folders import locked
from mpcompare.command.forks import fork_server
from mpcompare.command.going_on import finished, how_to_go_on, ready, take_over
from mpcompare.command.job import run
from mpcompare.command.plan import rules_of, sections_of, stages_of
from mpcompare.command.process import GRACE_S, Process
from mpcompare.command.sweep import Job, races_of
from mpcompare.errors import InputError, check_number, fail
from mpcompare.interrupt import interruptible, uninterrupted
from mpcompare.race.progress import Board
from mpcompare.race.timetable import Timetable
from mpcompare.race.turns import race

log = logging.getLogger(__name__)

Races = dict[Path, list[Job]]  # by their files
Engine = Callable[[Races, HydraContext], object]


def launch(
    hydra: HydraContext,
    config: DictConfig,
    job_overrides: Sequence[Sequence[str]],
    initial_job_idx: int,
    engine: Engine,
) -> list[JobReturn]:
    """Plans the jobs of a sweep (``Launcher.launch``), and lets an engine run its races; a job's folder says how it
    ended. Raises InputError before any has begun, and ends the program where the sections of every job are wrong."""
    setup_globals()
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    races = races_of(hydra, config, job_overrides, initial_job_idx)
    for entrants in races:
        rules_of(entrants[0].config)  # wrong rules end the sweep before it began
        check_number("hydra.launcher.silence_limit_s", entrants[0].silence_limit_s, above=0)
    jobs = [job for entrants in races for job in entrants]
    if all(wrong := [_wrong_input(job) for job in jobs]):
        fail(*wrong)
    _check_allowed(config, jobs)
    take_over(races)
    for job in jobs:
        records.plan(job.folder, job.record_at_start)
    try:
        engine({race_file.write(entrants): entrants for entrants in races}, hydra)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(how_to_go_on(jobs[0].sweep)) from None
    return [job.ended() for job in jobs]


def _wrong_input(job: Job) -> str:
    """Returns what is wrong with the sections of a job, where it is seen without torch; else nothing."""
    try:
        sections_of(job.config)
    except WRONG_INPUT as error:
        return str(error)
    return ""


def _check_allowed(config: DictConfig, jobs: Sequence[Job]) -> None:
    """Raises InputError unless report.allow names fields of the jobs' tasks. The sweep's own configuration lacks what
    the sweep varies."""
    from mpcompare.report.comparable import check_allowed  # pandas is slow to import

    if isinstance(config.report, DictConfig):  # else each record says so
        tasks = [job.record_at_start["config"].get("task") for job in jobs]
        allow = OmegaConf.select(config, "report.allow", throw_on_resolution_failure=False)
        check_allowed(allow, [task for task in tasks if isinstance(task, dict)])


def run_races(races: Races, hydra: HydraContext) -> None:
    """Runs races one after the other, except finished races. A race that was begun goes on. Raises InputError where a
    folder holds another run, or a record could not be completed."""
    left = {path: jobs for path, jobs in races.items() if not finished(jobs)}
    if done := [job.name for path, jobs in races.items() if path not in left for job in jobs]:
        log.info(f"Finished before, and taken as they are: {', '.join(done)}")
    if not left:
        return
    of_job = {
        job.folder: stages_of(job.config, job.record_at_start["backend"], len(jobs))
        for jobs in left.values()
        for job in jobs
    }
    timetable = Timetable(of_job, time.monotonic())
    fork = not any(job.hydra["job"]["env_set"] for jobs in left.values() for job in jobs)
    log.info("Importing torch, which takes some seconds")
    with belongings() as own, fork_server(fork) as processes:
        for number, (path, jobs) in enumerate(left.items(), start=1):
            which = f"race {number} of {len(left)}" if len(left) > 1 else ""
            board = Board({job.name: job.folder for job in jobs}, timetable, before=which, after="then the report")
            with locked(path):
                if finished(jobs):  # by another process meanwhile
                    for job in jobs:
                        timetable.end_turn(job.folder, gone=True, now=time.monotonic())
                    continue
                ready(jobs)
                log.info(f"Race {number} of {len(left)}: {len(jobs)} taking turns")
                for job in jobs:
                    log.info(f"\t{job.name} : {' '.join(filter_overrides(job.overrides))}")
                _race(jobs, hydra, processes, board, own)


def _race(
    jobs: Sequence[Job], hydra: HydraContext, processes: context.BaseContext, board: Board, own: Belongings
) -> None:
    """Runs one race. However it ends, no process of it is left, and each job has a record. Raises InputError where the
    record of a job could not be completed."""
    entrants: list[Process] = []
    with interruptible(), own.shared(jobs[0].folder.parent) as shared, board:
        try:
            for job in jobs:
                with uninterrupted():  # an entrant that has started is in the list
                    task = partial(run, shared=shared, at_start=job.record_at_start)
                    entrants.append(Process(job, hydra, task, board, processes, own))
            race(entrants, rules_of(jobs[0].config), board, uuid4().hex[:8], trained=_says_first_verdicts(jobs, board))
        finally:
            with uninterrupted():
                for entrant in entrants:
                    entrant.ask_to_stop()
                deadline = time.monotonic() + GRACE_S
                for entrant in entrants:
                    entrant.end(deadline)
                own.end_orphans()
    if lost := [entrant.unrecorded for entrant in entrants if entrant.unrecorded]:
        raise lost[0]


def _says_first_verdicts(jobs: Sequence[Job], board: Board) -> Callable[[str], None]:
    """Returns a function that is told of each examined entrant, and says the verdicts that the entrant makes possible,
    each once. An error in it costs the race nothing: the report says the verdicts in the end."""
    folders = {job.name: job.folder for job in jobs}  # in the order of turns
    baseline, allow = (OmegaConf.select(jobs[0].config, f"report.{key}") for key in ("baseline", "allow"))
    trained: list[str] = []
    said: set[str] = set()

    def examined(name: str) -> None:
        from mpcompare.report.verdicts import first_verdicts  # pandas and scipy are slow to import

        trained.append(name)
        waiting = list(folders)[list(folders).index(name) + 1 :]
        try:
            lines = first_verdicts(folders, trained, waiting, str(baseline), allow or ())
        except InputError:
            return
        except Exception as error:
            log.warning("no first verdict: %s: %s", type(error).__name__, error)
            return
        for each, line in lines.items():
            if each not in said:
                board.line(line)
        said.update(lines)

    return examined
