"""A command of mpcompare as a fork of this process, which has imported torch: so a fault takes seconds."""

import csv
import hashlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file

from mpcompare.__main__ import main as run_mpcompare
from mpcompare.checkpoints import CHECKPOINTS, newest
from mpcompare.command import preload  # noqa: F401 - all that a run needs, and no thread

LONGEST_S = 300.0
SCORES = ("final_loss", "test_loss", "test_accuracy", "skipped_steps", "dtypes", "module_dtypes")


class Command:
    """A command that runs in a session of its own, where the processes that it leaves can be found."""

    def __init__(
        self,
        *arguments: str,
        main: Callable[[], None] = run_mpcompare,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts the command. ``prepare`` is called in its process, whose stdout and stderr are a pipe."""
        sys.stdout.flush()
        self.began = time.monotonic()
        self._reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(_as_a_program(arguments, main, prepare, writing))
        os.close(writing)

    def ended_within(self, seconds: float) -> bool:
        """Returns whether the command has ended so long after it began, and waits until then."""
        while not os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
            if time.monotonic() - self.began > seconds:
                return False
            time.sleep(0.002)
        return True

    def lose_its_reader(self) -> None:
        """Closes the other end of its stdout and stderr."""
        os.close(self._reading)
        self._reading = -1

    def end(self) -> tuple[int, str]:
        """Waits for its end. Returns its exit code, or minus the signal that ended it, and what it has printed.

        Raises:
            AssertionError: it hangs, or has left a process.
        """
        ended = self.ended_within(LONGEST_S)
        if not ended:
            os.killpg(self.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        said = ""
        if self._reading >= 0:
            with open(self._reading, errors="replace") as pipe:  # noqa: PTH123 - it has no path
                said = pipe.read()
        assert ended, f"it hangs: {said}"
        assert not (left := left_of(self.pid)), f"it has left {left}"
        return code, said


def left_of(session: int) -> list[str]:
    """Returns the commands of the processes of a session that are alive."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found


def _as_a_program(
    arguments: tuple[str, ...], main: Callable[[], None], prepare: Callable[[], None], writing: int
) -> int:
    """Runs the command in a fork as Python would, and returns its exit code."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    os.close(writing)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    sys.argv = ["mpcompare", *arguments]
    code: object = 0
    try:
        prepare()
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream:
                stream.flush()
        except OSError:
            code = 120  # as Python has it
    return code if isinstance(code, int) else 0 if code is None else 1


def error_line(code: int, said: str) -> str:
    """Returns the one line that a refused command has printed.

    Raises:
        AssertionError: it was not refused, or has printed a traceback, or more or less than one such line.
    """
    lines = re.findall(r"^mpcompare: error: .*", said, re.MULTILINE)
    assert (code, len(lines)) == (2, 1), (code, said)
    assert "Traceback" not in said, said
    return str(lines[0])


def numbers_of(run: Path, after: int = 0) -> dict[str, Any]:
    """Returns what must be the same bit for bit in two runs of one task: steps and evaluations after a step, scores,
    and the tensors of the last checkpoint."""
    result = json.loads((run / "result.json").read_text())
    assert result["status"] == "ok", result.get("error")
    last = newest(run / CHECKPOINTS)
    assert last
    return {
        "steps": [row for row in _rows(run / "steps.csv") if int(row["step"]) > after],
        "evals": [row for row in _rows(run / "evals.csv") if int(row["step"]) > after],
        "scores": {key: result[key] for key in SCORES},
        "last": (last.name, _tensors(last / "state.safetensors")),
    }


def _tensors(file: Path) -> dict[str, str]:
    """Returns a hash of each tensor but the state of Python's generator, with which no run here computes."""
    tensors = load_file(file)
    tensors.pop("generators/python")
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


def _rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return [{name: text for name, text in row.items() if name != "step_ms"} for row in csv.DictReader(lines)]


def digest(folder: Path) -> str:
    """Returns a hash of all files below a folder and of their names."""
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        whole.update(str(path.relative_to(folder)).encode())
        whole.update(path.read_bytes() if path.is_file() else b"")
    return whole.hexdigest()
