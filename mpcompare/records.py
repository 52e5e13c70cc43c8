"""What a run writes down, and reads back: ``steps.csv``, a row a step, and ``result.json``, everything else."""

import csv
import json
import math
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from mpcompare.errors import InputError

STEP_FIELDS = ("step", "warmup", "loss", "loss_scale", "skipped", "step_ms")
STEPS, RESULT = "steps.csv", "result.json"


def write_atomically(path: Path, text: str) -> None:
    """Writes a file that is there whole or not at all, by writing beside it and renaming."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as unfinished:
        unfinished.write(text)
        unfinished.flush()
        os.fsync(unfinished.fileno())
    Path(unfinished.name).chmod(0o644)
    Path(unfinished.name).replace(path)


class Recorder:
    """Writes one run into ``folder``; a run that was killed leaves its finished steps and ``status: running``."""

    def __init__(self, folder: Path, result: dict[str, Any]) -> None:
        """Writes ``result`` with status ``running``. Raises InputError if the folder already holds a run."""
        self.folder = folder
        self.result = {"status": "running", **result}
        if (folder / RESULT).exists() or (folder / STEPS).exists():
            raise InputError("hydra.run.dir", folder, "already holds a run, and nothing is overwritten: name another")
        self._write()

    def steps(self, rows: Sequence[dict[str, Any]]) -> None:
        """Appends rows of ``STEP_FIELDS`` to ``steps.csv`` in one write: whole lines, whatever happens next."""
        path = self.folder / STEPS
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, STEP_FIELDS)
            if file.tell() == 0:
                writer.writeheader()
            writer.writerows(rows)

    def add(self, **result: Any) -> None:
        """Adds to the result and writes it."""
        self.result.update(result)
        self._write()

    def _write(self) -> None:
        text = json.dumps(_finite(self.result), indent=2, allow_nan=False)
        write_atomically(self.folder / RESULT, text + "\n")


def _finite(value: Any) -> Any:
    """JSON has no inf and NaN: they become the strings ``inf``, ``-inf``, ``nan``, which ``float()`` reads back."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Run:
    """One run as read back.

    Attributes:
        folder: where it lies.
        result: ``result.json``.
        steps: ``steps.csv``, empty if no step was finished.
    """

    folder: Path
    result: dict[str, Any]
    steps: pd.DataFrame


def read_run(folder: Path) -> Run:
    """Reads a run folder. Raises InputError if a file in it is not readable as what it should be."""
    try:
        result = json.loads((folder / RESULT).read_text())
        has_steps = (folder / STEPS).exists()
        steps = pd.read_csv(folder / STEPS) if has_steps else pd.DataFrame(columns=list(STEP_FIELDS))
    except (OSError, ValueError) as error:
        raise InputError("folder", folder, f"not a readable run ({error})") from error
    return Run(folder, result, steps)


def find_runs(folders: Sequence[Path]) -> list[Run]:
    """All runs at and below ``folders``, in natural order of their paths (2 before 10)."""
    found: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise InputError("folder", folder, "no such folder")
        here = sorted((path.parent for path in folder.rglob(RESULT)), key=_natural)
        if not here:
            raise InputError("folder", folder, f"holds no run: no {RESULT} in it or below")
        found.update(dict.fromkeys(path.resolve() for path in here))
    return [read_run(path) for path in found]


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sort key: a folder named by a job number sorts by that number."""
    leading = [(re.match(r"\d+", part), part) for part in path.parts]
    return [(int(number.group()) if number else -1, part) for number, part in leading]
