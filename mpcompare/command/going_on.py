"""A race that was killed goes on in its own folders, or in the folders of a new sweep (``resume=``). The files of its
runs are taken there before any job begins.

A finished race is taken whole. In any other race each entrant goes on from its last checkpoint, or is taken as it is if
it was trained and examined, or begins; then all are timed anew, together. The folders of a killed sweep that goes on in
a new one stay as they are, and the new sweep does not need them any more.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from mpcompare import records
from mpcompare.command.folders import locked
from mpcompare.command.sweep import Job
from mpcompare.errors import InputError
from mpcompare.records import BLOCKS, CHECKPOINTS, MACHINE, PLANNED, RESULT, TIMES, WENT_ON

SWEEP = "multirun.yaml"  # Hydra writes it into the folder of a sweep before anything else
FREE = ("resume", "resume_older", "report", "train.checkpoint_every")  # in these the two sweeps may differ
TIMED = ("measure", "inference")  # and in these where all is timed anew


def is_sweep(config: Mapping[str, Any]) -> bool:
    """Returns whether ``resume`` names the folder of a sweep, and no run or checkpoint."""
    return config["resume"] is not None and (_source(config) / SWEEP).is_file()


def how_to_go_on(folder: Path) -> str:
    """Returns how an interrupted run or sweep in ``folder`` goes on; empty where it has no checkpoint."""
    return f"the same command with resume={folder} goes on" if records.has_checkpoint(folder) else ""


def take_over(races: Sequence[Sequence[Job]]) -> None:
    """Takes into the folders of jobs the files of the sweeps that the jobs resume. Raises InputError where such a sweep
    had other jobs, or its files cannot be read or copied."""
    jobs = [job for race in races for job in race if is_sweep(job.record_at_start["config"])]
    left: dict[str, _Left] = {}
    for source in dict.fromkeys(_source(job.record_at_start["config"]) for job in jobs):
        of_source = [job for job in jobs if _source(job.record_at_start["config"]) == source]
        with _reading("resume", source):
            left |= _fitting(source, of_source)
    for race in races:
        whole = all(job.name in left and left[job.name].is_whole(job) for job in race)
        for job in race:
            if job.name in left:
                left[job.name].take(job, whole)


def finished(race: Sequence[Job]) -> bool:
    """Returns whether all runs of a race are there, in their own folders, and are finished. Raises InputError where a
    folder holds the run of another configuration, or its record cannot be read."""
    left = {job.name: run for job in race if (run := _begun(job))}
    for job in race:
        if job.name in left and (fields := left[job.name].differing(job, FREE)):
            raise InputError("race", job.folder, f"already holds another run, which has {fields[0]}")
    return all(job.name in left and left[job.name].is_whole(job) for job in race)


def ready(race: Sequence[Job]) -> None:
    """Readies the folders of a race, when the processes that ran it before are gone. Raises InputError where a folder
    is not there and cannot be made."""
    for job in race:
        try:
            job.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError("race", job.folder, f"cannot write there ({error.strerror})") from error
        with locked(job.folder):
            if run := _begun(job):
                run.ready(job)


def _begun(job: Job) -> "_Left | None":
    if not (job.folder / RESULT).exists():
        return None
    with _reading("race", job.folder):
        return _Left.read(job.folder)


@contextmanager
def _reading(field: str, source: Path) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(field, source, f"a record there cannot be read ({error})") from error


def _source(config: Mapping[str, Any]) -> Path:
    return Path(str(config["resume"])).expanduser()


def _fitting(source: Path, jobs: Sequence[Job]) -> "dict[str, _Left]":
    """Returns the run that each job goes on with, by the job's name. Jobs that have none begin."""
    runs = [_Left.read(path.parent) for path in sorted(source.rglob(RESULT))]
    runs = [run for run in runs if run.result["status"] == "ok" or run.has_checkpoint]
    fitting: dict[str, _Left] = {}
    for run in runs:
        free = [job for job in jobs if job.name not in fitting]
        others = {job.name: run.differing(job, (*FREE, *TIMED)) for job in free}
        if name := next((name for name, fields in others.items() if not fields), None):
            fitting[name] = run
        elif jobs[0].hydra["sweeper"].get("max_batch_size") is None:  # else it may be a job of a later batch
            fields = min(others.values(), key=len, default=["nothing"])
            more = f"; and {len(fields) - 1} more differ" if len(fields) > 1 else ""
            expected = f"no job of this sweep goes on with {run.folder.name}, which has {fields[0]}{more}"
            raise InputError("resume", source, f"{expected}: give the command that began it")
    return fitting


@dataclass(frozen=True)
class _Left:
    """A run that a killed sweep has left: its folder and its ``result.json``."""

    folder: Path
    result: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "_Left":
        result = json.loads((folder / RESULT).read_text())
        records.check_format(folder / RESULT, result)
        return cls(folder, result)

    @property
    def has_checkpoint(self) -> bool:
        return records.has_checkpoint(self.folder)

    def differing(self, job: Job, free: Sequence[str]) -> list[str]:
        """Returns the fields in which its configuration differs from a job's configuration, with both values."""
        was, now = _fields(self.result["config"], free), _fields(records.finite(job.record_at_start["config"]), free)
        fields = [field for field in dict.fromkeys((*was, *now)) if was.get(field) != now.get(field)]
        return [f"{field}={was.get(field)} and not {now.get(field)}" for field in fields]

    def is_whole(self, job: Job) -> bool:
        """Returns whether it is finished, and was timed as the job is to be."""
        return self.result["status"] == "ok" and not self.differing(job, FREE)

    def take(self, job: Job, whole: bool) -> None:
        """Takes its files into the folder of a job, its result last: with the result the files count. Takes its times
        only if it is taken ``whole``."""
        result = (self.result if whole else self._untimed()) | self._origin(None)
        result |= {"sweep": job.record_at_start["sweep"]}
        leave = shutil.ignore_patterns(RESULT, CHECKPOINTS, ".*", "*.log", *(() if whole else [BLOCKS]))
        try:
            shutil.copytree(self.folder, job.folder, ignore=leave, dirs_exist_ok=True)
            if (self.folder / CHECKPOINTS).is_dir():
                shutil.copytree(self.folder / CHECKPOINTS, job.folder / CHECKPOINTS, copy_function=_link)
            records.write_json(job.folder / RESULT, result, indent=2)
        except (OSError, shutil.Error) as error:
            raise InputError("resume", self.folder, f"cannot be taken into {job.folder} ({error})") from error

    def ready(self, job: Job) -> None:
        """Readies the folder, which is the job's own, to go on after its last checkpoint. Without a checkpoint the job
        begins anew: then the old files get names such as ``steps.csv.1``, and are kept."""
        if self.result["status"] == PLANNED:
            return
        origin = self.result["config"].get("resume")  # if training began elsewhere, not all steps are here
        if self.has_checkpoint and (origin is None or is_sweep(self.result["config"])):
            result = self._untimed() | self._origin(self.result.get(WENT_ON))
            records.write_json(self.folder / RESULT, result, indent=2)
            (self.folder / BLOCKS).unlink(missing_ok=True)
            return
        files = [file for file in self.folder.iterdir() if file.name != RESULT and not file.name[-1].isdigit()]
        number = 1 + len(list(self.folder.glob(f"{RESULT}.*")))
        for file in (*files, self.folder / RESULT):
            file.rename(f"{file}.{number}")
        records.plan(self.folder, job.record_at_start)

    def _untimed(self) -> dict[str, Any]:
        """Returns the result of a run that goes on: without the times."""
        result = dict(takewhile(lambda item: item[0] not in TIMES, self.result.items()))
        return {**result, "status": "running"}

    def _origin(self, earlier: Any) -> dict[str, Any]:
        """Returns the entry that says where the run was before; ``earlier`` if there is one."""
        on = {key: self.result[key] for key in MACHINE if key in self.result}
        return {WENT_ON: {**(earlier or {"path": str(self.folder)}), "step": None, "on": on}}


def _fields(config: Mapping[str, Any], free: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of a configuration, such as ``train.steps``, but for ``free`` fields and sections."""
    named = ((field, value) for name in config for field, value in records.named_fields(name, config[name]).items())
    return {field: value for field, value in named if field not in free and field.split(".")[0] not in free}


def _link(source: str, target: str) -> None:
    """Gives a file, which is written once, a second name, or copies it where no second name can be had."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
