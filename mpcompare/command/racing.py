"""``mpcompare plan`` and ``mpcompare run``: races as files, which any machine can run."""

import argparse
import json
import logging
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import configure_log
from hydra.types import HydraContext

from mpcompare import records
from mpcompare.command import race_file
from mpcompare.command.launcher import Races, run_races
from mpcompare.errors import InputError, fail, fails_on_input_errors
from mpcompare.paths import CONF
from mpcompare.records import PLANNED, RESULT

log = logging.getLogger(__name__)

ARRAY = """\
#!/bin/bash
# The races in {folder}, one a task and each with a node to itself.
# Options of the command line come before these: sbatch --partition=cpu --time=60 --array=0-{last}%8 {name}
#SBATCH --job-name=mpcompare
#SBATCH --array=0-{last}
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={folder}/%a.log
cd {cwd}
exec {python} -m mpcompare run --resume "$(printf '%s/%03d.json' {folder} "$SLURM_ARRAY_TASK_ID")"
"""


def plan_arguments(words: Sequence[str]) -> list[str]:
    """Returns the arguments of Hydra for the arguments of ``mpcompare plan``."""
    parser = argparse.ArgumentParser(
        prog="mpcompare plan",
        usage="%(prog)s [--array FILE] ARGS...",
        description="Write each race of a sweep into a file, DIR/races/000.json and so on, where DIR is "
        "hydra.sweep.dir. ARGS are as for the sweep, python -m mpcompare -m ARGS; none of it is run.",
    )
    parser.add_argument("--array", metavar="FILE", help="also write a script for sbatch: an array of all races")
    asked, overrides = parser.parse_known_args(words)
    array = [] if asked.array is None else [f"hydra.launcher.array={json.dumps(asked.array, ensure_ascii=False)}"]
    return ["-m", "hydra/launcher=plan", *array, *overrides]


def tell(races: Races, hydra: HydraContext, array: str | None) -> None:
    """Says where planned races are, and writes a script that runs them as an array. Raises InputError if it cannot."""
    files = list(races)
    folder = files[0].parent
    log.info(f"{len(files)} race{'s are files' if len(files) > 1 else ' is a file'} in {folder}")
    if array is not None:
        path, last = Path(array), len(list(folder.glob("*.json"))) - 1
        words = {"folder": folder.absolute(), "cwd": Path.cwd(), "python": sys.executable, "name": path.name}
        text = ARRAY.format(last=last, **{key: shlex.quote(str(value)) for key, value in words.items()})
        try:
            records.write_atomically(path, lambda unfinished: unfinished.write_text(text))
        except OSError as error:
            raise InputError("--array", path, f"cannot write there ({error.strerror})") from error
        log.info(f"sbatch {shlex.quote(array)} runs them with SLURM")
    here, sweep = (shlex.quote(str(path)) for path in (folder, folder.parent))
    log.info(f"mpcompare run --resume {here}/*.json runs them here; mpcompare report {sweep} draws the table")


def run_files(words: Sequence[str]) -> bool:
    """Runs ``mpcompare run``; returns whether every run finished."""
    parser = argparse.ArgumentParser(
        prog="mpcompare run",
        description="Run races that mpcompare plan has written. The folders of their runs lie next to the folder of "
        "the files. Exit code 1 where a run did not finish, 2 where the input of all is wrong.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--resume", action="store_true", help="run what is missing, and go on with what was begun")
    asked = parser.parse_args(words)
    with fails_on_input_errors(), initialize_config_dir(str(CONF), version_base="1.3"):
        races = {path: race_file.read(path) for path in dict.fromkeys(asked.files)}
        jobs = [job for race in races.values() for job in race]
        begun = (job.folder for job in jobs if records.status(job.folder) not in (None, PLANNED))
        if not asked.resume and (folder := next(begun, None)):
            raise InputError("race", folder, f"already holds a run ({RESULT}); --resume runs what is missing")
        configure_log(jobs[0].config.hydra.hydra_logging, jobs[0].config.hydra.verbose)
        log.info(f"The host {records.host()} of these records is {platform.node()}")
        run_races(races, HydraContext(GlobalHydra.instance().config_loader(), Callbacks(jobs[0].config)))
        if wrong := records.wrong_inputs(job.folder for job in jobs):
            fail(*wrong)
        return all(records.status(job.folder) == "ok" for job in jobs)
