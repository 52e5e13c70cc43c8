"""Finished runs, read back from their folders."""

import io
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from mpcompare.errors import InputError
from mpcompare.fields import TYPES, Config, ConfigAtLeast, check_field
from mpcompare.foreign import printable, read_bytes, read_json
from mpcompare.records import (
    BLOCK_FIELDS,
    BLOCKS,
    EVAL_FIELDS,
    EVALS,
    NUMERICS,
    RESULT,
    STEP_FIELDS,
    STEPS,
    check_format,
    named_fields,
    numbers,
)
from mpcompare.typed import check_type, is_of
from mpcompare.verdict.findings import Findings, from_document

OBSERVED = ("dataset_fingerprint", "initial_weights")  # keys of a result that belong to the identity of its task
UNREADABLE = "unreadable"  # the status of a run whose files are not what a run writes


@dataclass(frozen=True)
class Run:
    """One run as its files tell it.

    Attributes:
        folder: that of the run.
        name: the folder, as short as tells it from the other runs that were read.
        result: ``result.json``.
        blocks: ``blocks.csv``, the timed blocks; no rows if nothing was timed.
        steps: ``steps.csv``; no rows if no step was finished.
        findings: ``numerics.json``; None if the run was not examined.
        evals: ``evals.csv``, loss and accuracy on held-out samples, by step; no rows of a run that wrote none.
    """

    folder: Path
    name: str
    result: dict[str, Any]
    steps: pd.DataFrame
    blocks: pd.DataFrame
    findings: Findings | None = None
    evals: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=list(EVAL_FIELDS)))

    @property
    def start(self) -> tuple[int, str] | None:
        """The step and the fingerprint of the weights at which training began; None for the initial weights."""
        resumed: dict[str, Any] | None = self.result.get("resumed_from")
        return (resumed["step"], resumed["weights"]) if resumed else None

    @cached_property
    def task_identity(self) -> dict[str, Any]:
        """Every field of the task, such as ``task.optimizer.lr``, the seed, and ``OBSERVED``, unless the run failed
        before it knew them. Empty where the task itself is not known: of a record that cannot be read."""
        config = self.result["config"]
        if not config["task"]:
            return {}
        observed = {key: self.result[key] for key in OBSERVED if key in self.result}
        return {**named_fields("task", config["task"]), "seed": config.get("seed", self.result["seed"]), **observed}


# The keys that every result has from its start, and those of a finished one.
AT_START = ("status", "backend", "precision", "task", "batch_size", "seed", "config")
FINISHED = (
    *("engine", "loss_scale", "dataset", "dataset_reason", "dataset_fingerprint", "initial_weights", "device_name"),
    *("step_ms_p20", "step_ms_p50", "step_ms_p80", "final_loss", "test_accuracy", "skipped_steps"),
    *("peak_memory_bytes", "peak_memory_bytes_analytic", "timing", "phase_ms", "phase_overhead"),
    *("first_step_ms", "construct_s"),
)


def read_run(folder: Path, name: str = "") -> Run:
    """Reads a run folder. Raises InputError if a file in it is not what a run writes."""
    try:
        if not (folder / RESULT).exists():
            raise ValueError(f"{RESULT} is missing")
        result = _checked(read_json(folder / RESULT))
        steps = _read(folder / STEPS, STEP_FIELDS, {"step": int, "warmup": bool, "skipped": bool, "clipped": bool})
        of_block = {"round": int, "steps": int, "throttle": str, "settled": bool, "finished": bool}
        blocks = _read(folder / BLOCKS, BLOCK_FIELDS, of_block)
        evals = _read(folder / EVALS, EVAL_FIELDS, {"step": int})
        examined = (folder / NUMERICS).exists()
        findings = from_document(numbers(read_json(folder / NUMERICS))) if examined else None
        _check_whole(result, steps, blocks)
    except Exception as error:  # whatever it is, the files are the cause
        said = str(error) if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {error}"
        raise InputError("folder", printable(str(folder)), f"not a readable run ({printable(said)})") from error
    return Run(folder, name or folder.name, result, steps, blocks, findings, evals)


def _checked(result: Any) -> dict[str, Any]:
    """Returns a result whose fields have their types. Of a run that did not finish, fields of other types are left out:
    they may be what it failed of.

    Raises:
        ValueError: it is none, or one that finished has a field of another type.
    """
    check_format(RESULT, result)
    finished = result.get("status") == "ok"
    for key in (*AT_START, *(FINISHED if finished else ())):
        if key not in result:
            raise ValueError(f"{RESULT} has no {key}")
    for key in ("status", "backend"):
        check_field(key, result[key])
    check_type("config", result["config"], Config if finished else ConfigAtLeast)
    if not finished:
        return {key: value for key, value in result.items() if key in AT_START or is_of(value, TYPES.get(key, Any))}
    for key, value in result.items():
        check_field(key, value)
    return result


def _check_whole(result: dict[str, Any], steps: pd.DataFrame, blocks: pd.DataFrame) -> None:
    """Raises ValueError unless a run that finished has all rows of its steps and blocks."""
    if result["status"] != "ok":
        return
    train = result["config"]["train"]
    first, total = steps_before(result) + 1, train["warmup_steps"] + train["steps"]
    if steps["step"].tolist() != list(range(first, total + 1)):
        raise ValueError(f"{STEPS} does not hold the steps {first} to {total}")
    rounds = result["timing"]["rounds"]
    if blocks["round"].tolist() != list(range(1, rounds + 1)):
        raise ValueError(f"{BLOCKS} does not hold the rounds 1 to {rounds}")


def read_any(folder: Path, name: str = "") -> Run:
    """Reads a run folder, as :func:`read_run`. One that cannot be read is a run with the status ``UNREADABLE`` and its
    reason, and with as much of the record as can be had: a report has a row for it."""
    try:
        return read_run(folder, name)
    except InputError as error:
        reason = str(error).partition(": not a readable run ")[2].removeprefix("(").removesuffix(")")
    known: dict[str, Any] = {"backend": folder.name, "precision": "", "task": None, "batch_size": None, "seed": None}
    with suppress(OSError, ValueError, TypeError):
        found = read_json(folder / RESULT)
        for key in (*known, "config", "sweep"):
            if key in found and is_of(found[key], TYPES[key]):
                known[key] = found[key]
    result = {"config": {"task": {}}, **known, "status": UNREADABLE, "error": reason}
    no_steps, no_blocks = (pd.DataFrame(columns=list(fields)) for fields in (STEP_FIELDS, BLOCK_FIELDS))
    return Run(folder, name or folder.name, result, no_steps, no_blocks)


def steps_before(result: dict[str, Any]) -> int:
    """Returns the number of steps before a run began: those of the checkpoint that it resumed from."""
    return int((result.get("resumed_from") or {}).get("step", 0))


def _read(path: Path, fields: Sequence[str], types: dict[str, type]) -> pd.DataFrame:
    """A file of :class:`RunRecorder`'s rows; columns that ``types`` does not name hold numbers."""
    text = read_bytes(path).decode() if path.exists() else ""
    text = text[: text.rfind("\n") + 1]  # a row that was cut off, by a full disk say, is no row
    if not text:
        return pd.DataFrame(columns=list(fields))
    rows = pd.read_csv(io.StringIO(text), dtype={field: types.get(field, float) for field in fields})
    if list(rows) != list(fields):
        raise ValueError(f"{path.name} {_other_columns(list(map(str, rows)), fields)}")
    return rows


def _other_columns(found: Sequence[str], expected: Sequence[str]) -> str:
    """Returns what is wrong with the columns of a file."""
    lacks, more = ([each for each in a if each not in b] for a, b in ((expected, found), (found, expected)))
    said = [f"{verb} {', '.join(names)}" for verb, names in (("lacks", lacks), ("should not have", more)) if names]
    return " and ".join(said) or "has its columns in another order"


def find_runs(folders: Sequence[Path]) -> list[Run]:
    """Returns all runs at and below ``folders``, in natural order of their paths (2 before 10).

    Raises:
        InputError: a folder is missing or holds no run, or no run can be read.
    """
    paths: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise InputError("folder", folder, "no such folder")
        here = sorted({path.parent for file in (RESULT, STEPS) for path in folder.rglob(file)}, key=_natural)
        if not here:
            raise InputError("folder", folder, f"holds no run: no {RESULT} in it or below")
        paths.update(dict.fromkeys(path.resolve() for path in here))
    common = Path(os.path.commonpath(list(paths)))
    runs = [read_any(path, printable(str(path.relative_to(common))).removeprefix(".")) for path in paths]
    if all(run.result["status"] == UNREADABLE for run in runs):
        raise InputError("folder", runs[0].folder, f"not a readable run ({runs[0].result['error']})")
    return runs


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sort key: a folder named by a job number sorts by that number."""
    leading = [(re.match(r"\d+", part), part) for part in path.parts]
    return [(int(number.group()) if number else -1, part) for number, part in leading]
