"""Kills sweeps that an engine runs, at random moments, and runs what is missing as docs/clusters.md says:

python scripts/cluster_kills.py                    # 12 sweeps as processes of this machine
python scripts/cluster_kills.py --executor slurm   # as jobs of a SLURM of one node, which is started for that

The driver of a sweep is killed, or all processes of a race, or, of SLURM, the node: its daemon and all that it runs.
In the end the table must be complete: each step and each evaluation bit for bit as in a sweep that nobody killed, all
that the examination found, each verdict, and times of one race. No process may be left, and no record half-written.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from sweep_kills import COMMAND, _first_difference, record

CLI = [sys.executable, "-m", "mpcompare"]
KINDS = ("the driver", "the worker", "the node")


def processes(words: str) -> list[psutil.Process]:
    """Returns the processes whose command line has these words."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if words in " ".join(process.cmdline()) and process.pid != os.getpid():
                found.append(process)
    return found


def kill(roots: Sequence[psutil.Process]) -> None:
    """Kills processes with all that they have started."""
    for root in roots:
        with suppress(psutil.NoSuchProcess):
            for process in [root, *root.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)


def is_left(folder: Path) -> bool:
    """Returns whether a process of a sweep still runs after some time to end in."""
    deadline = time.monotonic() + 300
    while processes(str(folder)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return bool(processes(str(folder)))


def check_records(folder: Path) -> None:
    """Raises ValueError if a record is half-written."""
    for path in [*folder.rglob("result.json"), *folder.rglob("races/*.json")]:
        json.loads(path.read_text())


def killed_and_resumed(folder: Path, executor: str, kind: str, after_s: float) -> str:
    """Kills one sweep, and lets it end or runs what is missing; returns what was done."""
    engine = ["hydra/launcher=slurm", f"hydra.launcher.executor={executor}"]
    with folder.with_suffix(".txt").open("w") as output:
        sweep = [*CLI, "-m", *COMMAND, *engine, f"hydra.sweep.dir={folder}"]
        driver = subprocess.Popen(sweep, stdout=output, stderr=output)
        with suppress(subprocess.TimeoutExpired):
            driver.wait(after_s)
        done = driver.poll() is not None
        if kind == "the driver":
            driver.kill()
        elif kind == "the worker":
            kill(processes(f"submitit.core._submit {folder}"))
        else:
            kill(processes("slurmd -D"))
            time.sleep(20)  # until SLURM takes the node for dead
            subprocess.Popen(["slurmd", "-D"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        driver.wait(900)
    assert not is_left(folder), "a process is left"
    check_records(folder)
    for words in (["run", "--resume", *map(str, sorted(folder.glob("races/*.json")))], ["report", str(folder)]):
        if folder.exists() and (folder / "races").exists():
            subprocess.run([*CLI, *words], check=True, capture_output=True)
    assert not is_left(folder), "a process is left"
    return f"{kind} after {after_s:.1f} s" + (", when it was done" if done else "")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=12, help="number of sweeps")
    parser.add_argument("--executor", choices=("local", "slurm"), default="local")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    asked = parser.parse_args(arguments)
    moment = random.Random(asked.seed)
    with tempfile.TemporaryDirectory(prefix="cluster-kills-") as name, _engine(asked.executor):
        began, whole = time.monotonic(), Path(name) / "whole"
        engine = ["hydra/launcher=slurm", f"hydra.launcher.executor={asked.executor}"]
        subprocess.run([*CLI, "-m", *COMMAND, *engine, f"hydra.sweep.dir={whole}"], check=True, capture_output=True)
        lasted, expected = time.monotonic() - began, record(whole)
        for number in range(1, asked.kills + 1):
            kinds = KINDS if asked.executor == "slurm" else KINDS[:2]
            after_s = moment.uniform(5, lasted)  # from the plan on
            said = killed_and_resumed(Path(name) / f"killed{number}", asked.executor, moment.choice(kinds), after_s)
            for part, found in record(Path(name) / f"killed{number}").items():
                assert found == expected[part], f"{said}: {_first_difference(part, found, expected[part])}"
            print(f"{number}: complete after a kill of {said}", flush=True)


@contextmanager
def _engine(executor: str) -> Iterator[None]:
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
