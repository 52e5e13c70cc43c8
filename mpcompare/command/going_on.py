"""A sweep that was killed goes on in a new one: what its runs have is taken into the new folders before any job begins.

A race that was finished is taken whole. In any other each entrant goes on from its last checkpoint, or is taken as it
is if it was trained and examined, or begins; then all are timed anew, together. The folders of the killed sweep stay as
they are, and the new sweep does not need them any more.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from mpcompare.command.sweep import Job
from mpcompare.errors import InputError
from mpcompare.records import (
    BLOCKS,
    CHECKPOINTS,
    RESULT,
    TIMES,
    WENT_ON,
    check_format,
    finite,
    named_fields,
    write_json,
)

SWEEP = "multirun.yaml"  # Hydra writes it into the folder of a sweep before anything else
FREE = ("resume", "resume_older", "report", "train.checkpoint_every")  # in these the two sweeps may differ
TIMED = ("measure", "inference")  # and in these where all is timed anew


def is_sweep(cfg: DictConfig) -> bool:
    """Returns whether ``resume`` names the folder of a sweep, and no run or checkpoint."""
    return cfg.resume is not None and (_source(cfg) / SWEEP).is_file()


def take_over(races: Sequence[Sequence[Job]]) -> list[str]:
    """Takes into the folders of jobs what the sweeps have left that they resume.

    Returns:
        The names of the jobs of which nothing is to be done: their races were finished.

    Raises:
        InputError: such a sweep had other jobs, or its files cannot be read or copied.
    """
    jobs = [job for race in races for job in race if is_sweep(job.config)]
    left: dict[str, _Left] = {}
    for source in dict.fromkeys(_source(job.config) for job in jobs):
        try:
            left |= _fitting(source, [job for job in jobs if _source(job.config) == source])
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError("resume", source, f"a record there cannot be read ({error})") from error
    finished: list[str] = []
    for race in races:
        if all(job.name in left and left[job.name].is_whole(job) for job in race):
            finished += [job.name for job in race]
        for job in race:
            if job.name in left:
                left[job.name].take(job, whole=job.name in finished)
    return finished


def _source(cfg: DictConfig) -> Path:
    return Path(str(cfg.resume)).expanduser()


def _fitting(source: Path, jobs: Sequence[Job]) -> "dict[str, _Left]":
    """Returns the run that each job goes on with, by the job's name. Jobs that have none begin."""
    runs = [_Left(path.parent, json.loads(path.read_text())) for path in sorted(source.rglob(RESULT))]
    for run in runs:
        check_format(run.folder / RESULT, run.result)
    runs = [run for run in runs if run.result["status"] == "ok" or any((run.folder / CHECKPOINTS).glob("step-*"))]
    fitting: dict[str, _Left] = {}
    for run in runs:
        free = [job for job in jobs if job.name not in fitting]
        others = {job.name: run.differing(job, (*FREE, *TIMED)) for job in free}
        if name := next((name for name, fields in others.items() if not fields), None):
            fitting[name] = run
        elif jobs[0].config.hydra.sweeper.get("max_batch_size") is None:  # else it may be one of a later batch
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

    def differing(self, job: Job, free: Sequence[str]) -> list[str]:
        """Returns the fields in which its configuration is not that of a job, with both values."""
        was, now = _fields(self.result["config"], free), _fields(finite(job.resolved), free)
        fields = [field for field in dict.fromkeys((*was, *now)) if was.get(field) != now.get(field)]
        return [f"{field}={was.get(field)} and not {now.get(field)}" for field in fields]

    def is_whole(self, job: Job) -> bool:
        """Returns whether it is finished, and was timed as the job is to be."""
        return self.result["status"] == "ok" and not self.differing(job, FREE)

    def take(self, job: Job, whole: bool) -> None:
        """Takes its files into the folder of a job, its result last, with which they count; its times only if it is
        taken ``whole``."""
        result = dict(self.result if whole else takewhile(lambda item: item[0] not in TIMES, self.result.items()))
        result |= {} if whole else {"status": "running"}
        result |= {"sweep": job.record_at_start["sweep"], WENT_ON: {"path": str(self.folder), "step": None}}
        leave = shutil.ignore_patterns(RESULT, CHECKPOINTS, ".*", "*.log", *(() if whole else [BLOCKS]))
        try:
            shutil.copytree(self.folder, job.folder, ignore=leave, dirs_exist_ok=True)
            if (self.folder / CHECKPOINTS).is_dir():
                shutil.copytree(self.folder / CHECKPOINTS, job.folder / CHECKPOINTS, copy_function=_link)
            write_json(job.folder / RESULT, result, indent=2)
        except (OSError, shutil.Error) as error:
            raise InputError("resume", self.folder, f"cannot be taken into {job.folder} ({error})") from error


def _fields(config: Mapping[str, Any], free: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of a configuration, such as ``train.steps``, but for ``free`` fields and sections."""
    named = ((field, value) for name in config for field, value in named_fields(name, config[name]).items())
    return {field: value for field, value in named if field not in free and field.split(".")[0] not in free}


def _link(source: str, target: str) -> None:
    """Gives a file a second name, which costs nothing, or copies it where that cannot be had. Checkpoints are written
    once."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
