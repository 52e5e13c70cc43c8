"""Kills sweeps that an engine runs, at random moments, and runs what is missing as docs/clusters.md says:

python scripts/cluster_kills.py                    # 12 sweeps as processes of this machine
python scripts/cluster_kills.py --executor slurm   # as jobs of a SLURM of one node, which is started for that

Each moment lies between the plan of a sweep and its end. The script kills the driver of a sweep, or all processes of a
race, or SLURM's daemon of the node. In the end the table must be complete, with each verdict, all that the examination
found, and times of two races. Each step and each evaluation must be the same, bit for bit, as in a sweep that nobody
killed. No process may be left, no record half-written, and nothing may take longer than ``LIMIT_S``.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from sweep_kills import _first_difference, record

CLI = [sys.executable, "-m", "mpcompare"]
SWEEP = (
    *("data=digits", "task.model.hidden=[16]", "task.batch_size=32", "task.samples=320", "train.warmup_steps=1"),
    *("train.steps=20", "train.checkpoint_every=5", "eval.every=10", "verdict.noise=1", "measure.budget_s=1"),
    *("measure.block_s=0.01", "measure.rel_ci=0.0001", "inference.budget_s=0.01", "report.formats=[]"),
    *("backend=amp,fp32", "seed=0,1", "hydra/launcher=slurm"),
)
JOBS, RACES = ("0-amp-auto", "1-amp-auto", "2-fp32-auto", "3-fp32-auto"), 2
KINDS = ("the driver", "the worker", "the node")
MARK = "CLUSTER_KILLS"  # the variable of the environment that tells the processes of one sweep
LIMIT_S = 300.0


def processes(folder: Path, words: str = "") -> list[psutil.Process]:
    """Returns the processes of a sweep whose command line has these words."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == str(folder) and words in " ".join(process.cmdline()):
                found.append(process)
    return found


def kill(roots: Sequence[psutil.Process]) -> None:
    """Kills processes with all that they have started."""
    for root in roots:
        with suppress(psutil.NoSuchProcess):
            for process in [*root.children(recursive=True), root]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def wait_for_the_last(folder: Path) -> None:
    """Waits until no process of a sweep runs any more."""
    deadline = time.monotonic() + LIMIT_S
    while left := processes(folder):
        assert time.monotonic() < deadline, f"{[process.cmdline() for process in left]} are left"
        time.sleep(0.2)


def check_records(folder: Path) -> None:
    """Raises ValueError if a record is half-written."""
    for path in [*folder.rglob("result.json"), *folder.rglob("numerics.json"), *folder.rglob("races/*.json")]:
        json.loads(path.read_text())


class Sweep:
    """A sweep whose driver runs."""

    def __init__(self, folder: Path, executor: str) -> None:
        """Starts it, and waits for its plan."""
        self.folder, self.environment = folder, {**os.environ, MARK: str(folder), "OMP_NUM_THREADS": "1"}
        command = [*CLI, "-m", *SWEEP, f"hydra.launcher.executor={executor}", f"hydra.sweep.dir={folder}"]
        self.output = folder.with_suffix(".txt").open("w")
        self.driver = subprocess.Popen(command, stdout=self.output, stderr=self.output, env=self.environment)
        while len(list(folder.glob("races/*.json"))) < RACES:
            assert self.driver.poll() is None, self.said()
            time.sleep(0.01)
        self.planned = time.monotonic()

    def said(self) -> str:
        return Path(self.output.name).read_text()

    def kill(self, kind: str, after_s: float) -> bool:
        """Kills some of its processes so long after the plan; returns whether the sweep was done before."""
        with suppress(subprocess.TimeoutExpired):
            self.driver.wait(after_s)
            return True
        if kind == "the driver":
            self.driver.kill()
        elif kind == "the worker":
            kill(processes(self.folder, "submitit.core._submit"))
        else:
            daemons = [each for each in psutil.process_iter(["name"]) if each.info["name"] == "slurmd"]
            kill([each for each in daemons if each.environ().get("SLURM_CONF") == os.environ["SLURM_CONF"]])
            time.sleep(15)  # until SLURM takes the node for dead
            subprocess.Popen(["slurmd", "-D"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.driver.wait(LIMIT_S)
        return False

    def complete(self) -> None:
        """Runs what is missing, and draws the report."""
        for words in (
            ["run", "--resume", *map(str, sorted(self.folder.glob("races/*.json")))],
            ["report", self.folder],
        ):
            ended = subprocess.run(
                [*CLI, *map(str, words)], env=self.environment, timeout=LIMIT_S, capture_output=True, text=True
            )
            assert ended.returncode == 0, (words, ended.stdout, ended.stderr)


def killed_and_resumed(folder: Path, executor: str, kind: str, after_s: float) -> str:
    """Kills one sweep, and lets it end or runs what is missing; returns what was done."""
    sweep = Sweep(folder, executor)
    done = sweep.kill(kind, after_s)
    check_records(folder)
    wait_for_the_last(folder)
    check_records(folder)
    statuses = sorted(json.loads((folder / job / "result.json").read_text())["status"] for job in JOBS)
    sweep.complete()
    wait_for_the_last(folder)
    return f"{kind} after {after_s:.1f} s" + (", when it was done" if done else f", which left {', '.join(statuses)}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=12, help="number of sweeps")
    parser.add_argument("--executor", choices=("local", "slurm"), default="local")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    asked = parser.parse_args(arguments)
    moment = random.Random(asked.seed)
    with tempfile.TemporaryDirectory(prefix="cluster-kills-") as name, engine(asked.executor):
        whole = Sweep(Path(name) / "whole", asked.executor)
        assert whole.driver.wait(LIMIT_S) == 0, whole.said()
        lasted, expected = time.monotonic() - whole.planned, record(whole.folder, JOBS)
        print(f"a sweep that nobody kills takes {lasted:.1f} s from its plan on", flush=True)
        for number in range(1, asked.kills + 1):
            kinds = KINDS if asked.executor == "slurm" else KINDS[:2]
            folder = Path(name) / f"killed{number}"
            said = killed_and_resumed(folder, asked.executor, moment.choice(kinds), moment.uniform(0, lasted))
            for part, found in record(folder, JOBS).items():
                assert found == expected[part], f"{said}: {_first_difference(part, found, expected[part])}"
            print(f"{number}: complete after a kill of {said}", flush=True)


@contextmanager
def engine(executor: str) -> Iterator[None]:
    """Starts a SLURM for the block, where races are to be its jobs."""
    if executor == "local":
        yield
        return
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
    from support.slurm import slurm  # type: ignore[import-not-found]

    with slurm() as conf:
        os.environ["SLURM_CONF"] = str(conf)
        yield


if __name__ == "__main__":
    main()
