"""Races as jobs of SLURM, or as processes of this machine, by submitit: ``hydra/launcher=slurm``.

Each race is one submission, which does what ``mpcompare run --resume FILE`` does. However the submission ends, no other
race is lost, and each of its runs has a record that says why.
"""

import importlib.util
import logging
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from hydra.types import HydraContext

from mpcompare import records
from mpcompare.command.going_on import finished
from mpcompare.command.launcher import Races
from mpcompare.errors import InputError, check_choice, check_whole, one_line
from mpcompare.interrupt import interruptible, uninterrupted

log = logging.getLogger(__name__)

FOLDER = "submitit"  # below the folder of the sweep: submitit's own files, and what a job has printed
POLL_S = {"slurm": 0.5, "local": 0.05}  # between two looks at jobs: at files that all nodes share, at processes here
ASK_S = 5.0  # between two questions to SLURM
ANSWER_S = 30.0  # seconds within which SLURM answers
GONE_S = 30.0  # a job that SLURM has not known for so long is over: a shared folder shows its last files later
GRACE_S = 30.0  # between cancelling all jobs and giving them up


class Submitted:
    """An engine that submits each race. Raises InputError where submitit is not installed, or SLURM cannot be reached.

    Args:
        executor: ``slurm`` or ``local``.
        at_once: the number of races that run at one moment with ``local``; SLURM bounds its jobs itself.
        parameters: the arguments of ``submitit.AutoExecutor.update_parameters``.
    """

    def __init__(self, executor: str, at_once: int, parameters: Mapping[str, Any]) -> None:
        check_choice("hydra.launcher.executor", executor, ("slurm", "local"))
        check_whole("hydra.launcher.at_once", at_once, at_least=1)
        if importlib.util.find_spec("submitit") is None:
            raise InputError("hydra/launcher", "slurm", "submitit is not installed: pip install 'mpcompare[slurm]'")
        if executor == "slurm":
            _check_reachable()
        self.executor, self.at_once, self.parameters = executor, at_once, dict(parameters)

    def __call__(self, races: Races, hydra: HydraContext) -> None:
        """Submits the races that are not finished, and waits for their ends. Raises InputError where the parameters are
        not accepted."""
        left = {path: jobs for path, jobs in races.items() if not finished(jobs)}
        if not left:
            return
        submit = self._submission(next(iter(left)).parent.parent / FOLDER)
        waiting, asked = list(left), time.monotonic()
        running: dict[Path, Any] = {}
        unknown: dict[str, float] = {}
        with interruptible():
            try:
                while waiting or running:
                    if room := waiting[: len(waiting) if self.executor == "slurm" else self.at_once - len(running)]:
                        running |= submit(room)
                        waiting = waiting[len(room) :]
                    time.sleep(POLL_S[self.executor])
                    if self.executor == "slurm" and (now := time.monotonic()) - asked > ASK_S:
                        unknown = {job.job_id: unknown.get(job.job_id, now) for job in _unknown(running.values())}
                        asked = now
                    gone = {number for number, since in unknown.items() if asked - since > GONE_S}
                    for path in [path for path, job in running.items() if _has_ended(job) or job.job_id in gone]:
                        _conclude(path, left[path], running.pop(path), self.executor)
            finally:
                with uninterrupted():
                    _cancel(running, self.executor)
                    for path, job in running.items():
                        _conclude(path, left[path], job, self.executor)

    def _submission(self, folder: Path) -> Callable[[list[Path]], dict[Path, Any]]:
        """Returns a function that submits races, and returns their jobs."""
        import submitit

        try:
            executor = submitit.AutoExecutor(folder, cluster=self.executor)
            executor.update_parameters(name="mpcompare", **self.parameters)
        except (NameError, TypeError, ValueError, AssertionError) as error:
            said = one_line(str(error).partition("\n")[0])  # lists of all parameters follow
            raise InputError("hydra.launcher.parameters", self.parameters, said) from error

        def submit(paths: list[Path]) -> dict[Path, Any]:
            try:
                with executor.batch() if self.executor == "slurm" else nullcontext():
                    jobs = {path: executor.submit(run_file, str(path.absolute())) for path in paths}
            except (submitit.core.utils.FailedJobError, subprocess.CalledProcessError, OSError) as error:
                raise InputError("hydra/launcher", "slurm", f"the races cannot be submitted ({error})") from error
            for path, job in jobs.items():
                log.info(f"{path.name}: job {job.job_id} of {self.executor}")
            return jobs

        return submit


def run_file(path: str) -> None:
    """Runs a race in a job."""
    from mpcompare.command.racing import run_files
    from mpcompare.streams import lasting

    with lasting():
        run_files(["--resume", path])


def _check_reachable() -> None:
    """Raises InputError unless SLURM takes jobs from here."""
    if not shutil.which("sbatch"):
        expected = "there is no sbatch on this machine; hydra.launcher.executor=local runs the races here"
        raise InputError("hydra/launcher", "slurm", expected)
    try:
        subprocess.run(["sinfo", "--noheader"], capture_output=True, text=True, check=True, timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        raise InputError("hydra/launcher", "slurm", f"SLURM did not answer within {ANSWER_S:g} s") from None
    except (OSError, subprocess.CalledProcessError) as error:
        said = one_line(str(getattr(error, "stderr", None) or error).strip())
        raise InputError("hydra/launcher", "slurm", f"SLURM cannot be reached ({said})") from error


def _has_ended(job: Any) -> bool:
    """Returns whether a job has left its result, or its process here is gone."""
    process = getattr(job, "_process", None)
    return bool(job.paths.result_pickle.exists()) if process is None else process.poll() is not None


def _unknown(jobs: Iterable[Any]) -> list[Any]:
    """Returns the jobs that SLURM neither runs nor will run; none where it does not answer."""
    known = _answer("squeue", "--noheader", "--array", "--me", "--format=%i")
    return [] if known is None else [job for job in jobs if job.job_id not in known.split()]


def _answer(*command: str) -> str | None:
    """Returns what a command of SLURM prints; None where it fails, or does not answer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=ANSWER_S).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _conclude(path: Path, jobs: Any, job: Any, executor: str) -> None:
    """Completes the records of a race whose job is over."""
    why = _error(job) if job.paths.result_pickle.exists() else _state(job.job_id) if executor == "slurm" else ""
    said = f"job {job.job_id} of {executor} ended" + (f" ({why})" if why else "")
    for each in jobs:
        with suppress(OSError, ValueError):  # a record that cannot be read is a row that says so
            records.conclude(each.folder, each.record_at_start, f"{said} without a word: see {job.paths.stderr}")
            records.explain(each.folder, said)
    log.info(f"{path.name}: {said}")


def _error(job: Any) -> str:
    """Returns the error with which a job has ended, such as a time limit's error; empty where it has none."""
    trace = str(job.exception()).rpartition("\n----------------------\n")[0]  # submitit says more around it
    return trace.strip().rpartition("\n")[2].removeprefix("submitit.core.utils.")


def _state(number: str) -> str:
    """Returns the state of a job that is over as SLURM says it: ``TIMEOUT, TimeLimit, on node7``."""
    shown = _answer("scontrol", "--oneliner", "show", "job", number)
    fields = dict(word.partition("=")[::2] for word in (shown or "").split())
    known = (fields.get("JobState"), fields.get("Reason"), fields.get("NodeList") and f"on {fields['NodeList']}")
    return ", ".join(word for word in known if word and word not in ("None", "on (null)")) or "SLURM says no more of it"


def _cancel(running: Mapping[Path, Any], executor: str) -> None:
    """Cancels jobs, and waits until they are gone."""
    for job in running.values():
        job.cancel(check=False)
    left, deadline = list(running.values()), time.monotonic() + GRACE_S
    while left and time.monotonic() < deadline:
        time.sleep(POLL_S[executor])
        over = _unknown(left) if executor == "slurm" else [job for job in left if _has_ended(job)]
        left = [job for job in left if job not in over]
