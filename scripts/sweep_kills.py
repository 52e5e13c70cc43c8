"""Kills sweeps at random moments, and resumes each as docs/resume.md says:

python scripts/sweep_kills.py                      # 20 sweeps, a quarter of an hour
python scripts/sweep_kills.py --kills 2 --seed 7   # a tenth, other moments

Each moment lies between the first file of a sweep and its end. The script kills all processes, or the launcher, or an
entrant, or the server of which entrants are forks. One of three resumed sweeps is killed again. In the end all must be
there as in a sweep that nobody killed: each step and each evaluation bit for bit, all that the examination found, each
verdict, and times of one race. No process may be left. A kill that costs anything ends the program with an
AssertionError.
"""

import argparse
import csv
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

COMMAND = (
    *("data=digits", "task.model.hidden=[32]", "task.batch_size=64", "task.samples=640", "train.warmup_steps=1"),
    *("train.steps=60", "train.checkpoint_every=7", "eval.every=10", "measure.budget_s=2", "measure.block_s=0.01"),
    *("measure.rel_ci=0.0001", "inference.budget_s=0.01", "report.formats=[]", "backend=amp,scratch,fp32"),
)
JOBS = ("0-amp-auto", "1-scratch-auto", "2-fp32-auto")
KINDS = ("all", "all", "the launcher", "the server", "an entrant")


class Sweep:
    """A sweep in a session of its own, where its processes can be found."""

    def __init__(self, folder: Path, *more: str) -> None:
        """Starts it, and waits for its first file."""
        self.folder, self.began = folder, time.monotonic()
        command = [sys.executable, "-m", "mpcompare", "-m", *COMMAND, f"hydra.sweep.dir={folder}", *more]
        self.output = folder.with_suffix(".txt").open("w+")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
        while not (folder / "multirun.yaml").exists():
            assert self.process.poll() is None, self.said()
            time.sleep(0.01)
        self.lasted = 0.0

    def end(self) -> None:
        """Waits for its end, which must be a good one."""
        code = self.process.wait(timeout=600)
        self.lasted = time.monotonic() - self.began
        assert code == 0, self.said()

    def kill(self, kind: str, after_s: float) -> str:
        """Kills some of its processes so long after the sweep began, and waits for the end of the others.

        Returns:
            The name of what was killed; empty where the sweep was done before.
        """
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=max(self.began + after_s - time.monotonic(), 0.0))
            return ""
        victims = self._victims(kind) or self._victims("all")
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGKILL)
        self.process.wait(timeout=600)
        return kind if kind == "all" or len(victims) == 1 else "all"

    def _victims(self, kind: str) -> list[psutil.Process]:
        """Returns the processes of one kind; none where there is none yet."""
        launcher = psutil.Process(self.process.pid)
        servers = [child for child in launcher.children() if "forkserver" in " ".join(child.cmdline())]
        if kind == "all":
            return [launcher, *launcher.children(recursive=True)]
        if kind == "the launcher":
            return [launcher]
        return servers if kind == "the server" else [each for server in servers for each in server.children()][:1]

    def has_left_nothing_running(self) -> bool:
        """Returns whether all its processes are gone within some seconds."""
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline:
            if not any(_session(process) == self.process.pid for process in psutil.process_iter()):
                return True
            time.sleep(0.1)
        return False

    def said(self) -> str:
        """Returns all that it has printed."""
        self.output.flush()
        return Path(self.output.name).read_text()


def _session(process: psutil.Process) -> int:
    with suppress(ProcessLookupError, PermissionError):
        return os.getsid(process.pid)
    return -1


def record(folder: Path, jobs: Sequence[str] = JOBS) -> dict[str, Any]:
    """Returns everything about a sweep that must not depend on kills, by the names of its jobs."""
    verdicts = json.loads((folder / "report" / "verdict.json").read_text())
    found: dict[str, Any] = {"verdicts": {job: "{word}: {because}".format(**verdicts[job]) for job in jobs}}
    races = set()
    for job in jobs:
        result = json.loads((folder / job / "result.json").read_text())
        assert result["status"] == "ok", (job, result.get("error"))
        races.add(result["timing"]["race"])
        numerics = json.loads((folder / job / "numerics.json").read_text())
        scores = {key: result[key] for key in ("final_loss", "test_loss", "test_accuracy", "dtypes", "module_dtypes")}
        found[job] = (_rows(folder / job / "steps.csv"), _rows(folder / job / "evals.csv"), numerics, scores)
    found["races"] = len(races)
    return found


def _rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return [{name: text for name, text in row.items() if name != "step_ms"} for row in csv.DictReader(lines)]


def _first_difference(name: str, found: Any, expected: Any) -> str:
    """Returns the name of the first value that differs, with both values."""
    if isinstance(found, dict) and isinstance(expected, dict) and found.keys() == expected.keys():
        pairs = [(str(key), found[key], expected[key]) for key in found]
    elif isinstance(found, (list, tuple)) and isinstance(expected, (list, tuple)) and len(found) == len(expected):
        pairs = [(str(place), *both) for place, both in enumerate(zip(found, expected, strict=True))]
    else:
        return f"{name} is {str(found)[:200]}, expected {str(expected)[:200]}"
    return next(_first_difference(f"{name}.{key}", one, other) for key, one, other in pairs if one != other)


def killed_and_resumed(folder: Path, expected: dict[str, Any], lasts_s: float, moment: random.Random) -> str:
    """Kills one sweep, and resumes it until it is done. Returns a line that says how."""
    folder.mkdir()
    told: list[str] = []
    resume: list[str] = []
    number = 0
    while True:
        sweep = Sweep(folder / str(number), *resume)
        resume = [f"resume={folder / str(number)}"]
        if told and moment.random() > 1 / 3:
            sweep.end()
            break
        after_s = moment.uniform(0, lasts_s)
        if whom := sweep.kill(moment.choice(KINDS), after_s):
            told.append(f"{whom} after {after_s:.1f} s")
        assert sweep.has_left_nothing_running(), told
        number += 1
    assert sweep.has_left_nothing_running(), told
    for part, found in record(sweep.folder).items():
        assert found == expected[part], f"{told}: {_first_difference(part, found, expected[part])}"
    return ", then ".join(told)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="number of sweeps that are killed at least once")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    asked = parser.parse_args(arguments)
    moment = random.Random(asked.seed)
    with tempfile.TemporaryDirectory(prefix="sweep-kills-") as name:
        whole = Sweep(Path(name) / "whole")
        whole.end()
        expected = record(whole.folder)
        assert expected["races"] == 1
        for number in range(1, asked.kills + 1):
            line = killed_and_resumed(Path(name) / f"killed{number}", expected, whole.lasted, moment)
            print(f"{number}: complete after a kill of {line}", flush=True)


if __name__ == "__main__":
    main()
