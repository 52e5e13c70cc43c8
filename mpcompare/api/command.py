"""The command in a process of its own.

A notebook's kernel has threads, handlers of signals, and a torch that has computed, so no race could be forked from it;
and Hydra keeps one configuration a process. So a call is the command ``python -m mpcompare -m ...``, and the caller's
process is left as it was.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mpcompare import caller
from mpcompare.errors import InputError

GRACE_S = 10.0  # seconds between Ctrl-C and a second one
ERROR = "mpcompare: error: "
KEPT = 20  # lines of what was said last, for the case that the command breaks


def run_command(overrides: Sequence[str], objects: Path) -> None:
    """Runs ``python -m mpcompare -m OVERRIDES``, and shows its progress line by line.

    Args:
        objects: the file of the caller's objects.

    Raises:
        InputError: the command ended with a line, or several, each of which says what is wrong.
        RuntimeError: the command broke.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "mpcompare", *overrides],
        env=_environment(objects), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, errors="replace",
    )  # fmt: skip
    said: list[str] = []
    errors: list[str] = []
    assert process.stderr is not None
    try:
        for line in process.stderr:
            said = [*said[1 - KEPT :], line.rstrip("\n")]
            if line.startswith(ERROR):
                errors.append(said[-1].removeprefix(ERROR))
            else:
                print(line, end="", flush=True)
        process.wait()
    except BaseException:
        _stop(process)
        raise
    if process.returncode == 2 and errors:
        raise InputError.of("; ".join(errors))
    if process.returncode not in (0, 1):
        raise RuntimeError(f"the command ended with exit code {process.returncode}: {' / '.join(said)}")


def _environment(objects: Path) -> dict[str, str]:
    """Returns the environment, with the caller's ``sys.path``, and without the wish for colours that a notebook has
    set: plain lines are shown here."""
    path = os.pathsep.join(each or str(Path.cwd()) for each in sys.path)
    kept = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "TTY_COMPATIBLE")}
    return {**kept, "PYTHONPATH": path, caller.FILE: str(objects)}


def _stop(process: subprocess.Popen[str]) -> None:
    """Ends the command: a terminal's Ctrl-C has reached it too, a notebook's has not."""
    if process.stderr is not None:
        process.stderr.close()
    for each in (None, signal.SIGINT, signal.SIGINT):
        if each is not None:
            process.send_signal(each)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S if each else 1.0)
            return
    process.kill()
    process.wait()
