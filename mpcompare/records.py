"""The record of a run, written and read back: ``steps.csv``, a row a step, and ``result.json``, everything else."""

import csv
import io
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from mpcompare.errors import InputError

MONITORED = ("grad_zero", "grad_subnormal", "grad_nonfinite", "lost_updates")  # empty in steps that are not
STEP_FIELDS = (
    *("step", "warmup", "loss", "lr", "loss_scale", "skipped", "grad_norm", "clipped", "step_ms"),
    *MONITORED,
)
EVAL_FIELDS = ("step", "test_loss", "test_accuracy")
BLOCK_FIELDS = (
    *("round", "steps", "step_ms", "wall_ms", "clock_mhz", "other_cores", "throttle", "settled"),
    "cores_between_turns",
)
STEPS, EVALS, BLOCKS, NUMERICS, RESULT = "steps.csv", "evals.csv", "blocks.csv", "numerics.json", "result.json"


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Lets ``write`` make a file beside ``path`` and moves it there: the new file is whole, or the old one stays."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    unfinished = Path(name)
    try:
        write(unfinished)
        unfinished.chmod(0o644)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def check_unused(field: str, folder: Path, below: bool = False) -> None:
    """Raises InputError if ``folder``, or one ``below`` it, holds a run: nothing that was written is overwritten."""
    for file in (RESULT, STEPS):
        if found := next(folder.glob(f"**/{file}" if below else file), None):
            expected = f"already holds a run ({found}), and nothing is overwritten: name another folder"
            raise InputError(field, folder, expected)


class Recorder:
    """Writes one run into ``folder``; a run that was killed leaves its finished steps and ``status: running``.

    Raises:
        InputError: from every method, where the folder cannot be written.
    """

    def __init__(self, folder: Path, result: dict[str, Any]) -> None:
        """Writes ``result`` with status ``running``. Raises InputError if the folder already holds a run."""
        self.folder = folder
        self.result = {"status": "running", **result}
        check_unused("hydra output folder", folder)
        self._write()

    def steps(self, rows: Sequence[dict[str, Any]]) -> None:
        """Appends rows of ``STEP_FIELDS`` to ``steps.csv``."""
        self._append(STEPS, STEP_FIELDS, rows)

    def evaluation(self, row: dict[str, Any]) -> None:
        """Appends a row of ``EVAL_FIELDS`` to ``evals.csv``."""
        self._append(EVALS, EVAL_FIELDS, [row])

    def block(self, row: dict[str, Any]) -> None:
        """Appends a row of ``BLOCK_FIELDS`` to ``blocks.csv``."""
        self._append(BLOCKS, BLOCK_FIELDS, [row])

    def _append(self, name: str, fields: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
        try:
            with (self.folder / name).open("a", newline="") as file:
                writer = csv.DictWriter(file, fields)
                if file.tell() == 0:
                    writer.writeheader()
                writer.writerows(rows)
        except OSError as error:
            raise self._unwritable(error) from error

    def numerics(self, found: dict[str, Any]) -> None:
        """Writes ``numerics.json``: what :func:`mpcompare.verdict.examine.examine.examine` found."""
        try:
            write_json(self.folder / NUMERICS, found)
        except OSError as error:
            raise self._unwritable(error) from error

    def add(self, **result: Any) -> None:
        """Adds to the result and writes it."""
        self.result.update(result)
        self._write()

    def _write(self) -> None:
        try:
            _write_result(self.folder, self.result)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> InputError:
        return InputError("hydra output folder", self.folder, f"cannot write there ({error.strerror})")


def conclude(folder: Path, at_start: dict[str, Any], cause: str) -> bool:
    """Completes the record of a run whose process is gone: one that still says ``running`` has failed for ``cause``.

    Args:
        at_start: the first entries of its result, for a run that has not written them.

    Returns:
        True if there was anything to complete.
    """
    path = folder / RESULT
    folder.mkdir(parents=True, exist_ok=True)
    result = json.loads(path.read_text()) if path.exists() else {"status": "running", **at_start}
    if result["status"] != "running":
        return False
    result.update(status="interrupted" if cause == "interrupted" else "failed", error=cause)
    _write_result(folder, result)
    return True


def _write_result(folder: Path, result: dict[str, Any]) -> None:
    write_json(folder / RESULT, result, indent=2)


def write_json(path: Path, value: dict[str, Any], indent: int | None = None) -> None:
    """Writes ``value`` whole or not at all."""
    text = json.dumps(finite(value), indent=indent, allow_nan=False) + "\n"
    write_atomically(path, lambda unfinished: unfinished.write_text(text))


def finite(value: Any) -> Any:
    """JSON has no inf and NaN: they become the strings ``inf``, ``-inf``, ``nan``, which ``float()`` reads back."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def named_fields(name: str, value: Any) -> dict[str, Any]:
    """A configuration as ``task.model.hidden`` and the like."""
    if not isinstance(value, dict) or not value:
        return {name: value}
    return {field: v for key, inner in value.items() for field, v in named_fields(f"{name}.{key}", inner).items()}


def numbers(value: Any) -> Any:
    """The inverse of :func:`finite`, for values that are no words."""
    if isinstance(value, dict):
        return {key: numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [numbers(item) for item in value]
    return float(value) if value in ("inf", "-inf", "nan") else value


@dataclass(frozen=True)
class Run:
    """One run as read back.

    Attributes:
        folder: where it lies.
        name: the folder, as short as tells it from the other runs that were read.
        result: ``result.json``.
        blocks: ``blocks.csv``, the timed blocks; no rows if nothing was timed.
        steps: ``steps.csv``; no rows if no step was finished.
        numerics: ``numerics.json``; None if the run was not examined.
        evals: ``evals.csv``, loss and accuracy on held-out samples, by step; no rows of a run that wrote none.
    """

    folder: Path
    name: str
    result: dict[str, Any]
    steps: pd.DataFrame
    blocks: pd.DataFrame
    numerics: dict[str, Any] | None = None
    evals: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=list(EVAL_FIELDS)))


# What a result must hold to be read as one, and to be read as a finished one.
IDENTITY = ("status", "backend", "precision", "task", "batch_size", "seed", "config")
FINISHED = (
    *("engine", "loss_scale", "dataset", "dataset_reason", "dataset_fingerprint", "initial_weights", "device_name"),
    *("step_ms_p20", "step_ms_p50", "step_ms_p80", "final_loss", "test_accuracy", "skipped_steps"),
    *("peak_memory_bytes", "peak_memory_bytes_analytic", "timing", "phase_ms", "phase_overhead"),
    *("first_step_ms", "construct_s"),
)


def read_run(folder: Path, name: str = "") -> Run:
    """Reads a run folder. Raises InputError if a file in it is not what a run writes."""
    try:
        result = json.loads((folder / RESULT).read_text())
        steps = _read(folder / STEPS, STEP_FIELDS, {"step": int, "warmup": bool, "skipped": bool, "clipped": bool})
        blocks = _read(folder / BLOCKS, BLOCK_FIELDS, {"round": int, "steps": int, "throttle": str, "settled": bool})
        evals = _read(folder / EVALS, EVAL_FIELDS, {"step": int})
        numerics = numbers(json.loads((folder / NUMERICS).read_text())) if (folder / NUMERICS).exists() else None
        _check(result, steps, blocks)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError("folder", folder, f"not a readable run ({error})") from error
    return Run(folder, name or folder.name, result, steps, blocks, numerics, evals)


def _check(result: dict[str, Any], steps: pd.DataFrame, blocks: pd.DataFrame) -> None:
    """Raises unless this is what a run writes, and, if it finished, all of it."""
    finished = result["status"] == "ok"
    if missing := [key for key in (*IDENTITY, *(FINISHED if finished else ())) if key not in result]:
        raise ValueError(f"{RESULT} has no {missing[0]}")
    if not isinstance(result["status"], str) or not isinstance(result["config"]["task"], dict):
        raise ValueError(f"{RESULT} is not one of mpcompare's")
    if not finished:
        return
    for key in ("step_ms_p20", "step_ms_p50", "step_ms_p80", "final_loss", "peak_memory_bytes"):
        float(result[key])
    train = result["config"]["train"]
    first, total = steps_before(result) + 1, train["warmup_steps"] + train["steps"]
    if steps["step"].tolist() != list(range(first, total + 1)):
        raise ValueError(f"{STEPS} does not hold the steps {first} to {total}")
    rounds = result["timing"]["rounds"]
    if blocks["round"].tolist() != list(range(1, rounds + 1)):
        raise ValueError(f"{BLOCKS} does not hold the rounds 1 to {rounds}")


def steps_before(result: dict[str, Any]) -> int:
    """How many steps had been taken where a run began: those of the checkpoint that it resumed from."""
    return int((result.get("resumed_from") or {}).get("step", 0))


def _read(path: Path, fields: Sequence[str], types: dict[str, type]) -> pd.DataFrame:
    """A file of :class:`Recorder`'s rows; columns that ``types`` does not name hold numbers. Those of ``MONITORED`` are
    empty where the file is older than they are."""
    text = path.read_text() if path.exists() else ""
    text = text[: text.rfind("\n") + 1]  # a row that was cut off, by a full disk say, is no row
    if not text:
        return pd.DataFrame(columns=list(fields))
    types = {field: types.get(field, float) for field in fields}
    rows = pd.read_csv(io.StringIO(text), dtype=types)
    if tuple(rows) not in (tuple(fields), tuple(field for field in fields if field not in MONITORED)):
        raise ValueError(f"{path.name} has columns {', '.join(map(str, rows))}")
    return rows.reindex(columns=list(fields))


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
    common = Path(os.path.commonpath(list(found)))
    return [read_run(path, str(path.relative_to(common)).removeprefix(".")) for path in found]


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sort key: a folder named by a job number sorts by that number."""
    leading = [(re.match(r"\d+", part), part) for part in path.parts]
    return [(int(number.group()) if number else -1, part) for number, part in leading]
