"""Finished runs, read back from their folders."""

import io
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from mpcompare.errors import InputError
from mpcompare.records import (
    BLOCK_FIELDS,
    BLOCKS,
    END_OF_BLOCK,
    EVAL_FIELDS,
    EVALS,
    MONITORED,
    NUMERICS,
    RESULT,
    STEP_FIELDS,
    STEPS,
    numbers,
)
from mpcompare.verdict.findings import Findings, from_document


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
        result = json.loads((folder / RESULT).read_text())
        steps = _read(folder / STEPS, STEP_FIELDS, {"step": int, "warmup": bool, "skipped": bool, "clipped": bool})
        of_block = {"round": int, "steps": int, "throttle": str, "settled": bool, "finished": bool}
        blocks = _read(folder / BLOCKS, BLOCK_FIELDS, of_block)
        evals = _read(folder / EVALS, EVAL_FIELDS, {"step": int})
        examined = (folder / NUMERICS).exists()
        findings = from_document(numbers(json.loads((folder / NUMERICS).read_text()))) if examined else None
        _check(result, steps, blocks)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError("folder", folder, f"not a readable run ({error})") from error
    return Run(folder, name or folder.name, result, steps, blocks, findings, evals)


def _check(result: dict[str, Any], steps: pd.DataFrame, blocks: pd.DataFrame) -> None:
    """Raises unless this is what a run writes, and, if it finished, all of it."""
    finished = result["status"] == "ok"
    if missing := [key for key in (*AT_START, *(FINISHED if finished else ())) if key not in result]:
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
    """Returns the number of steps before a run began: those of the checkpoint that it resumed from."""
    return int((result.get("resumed_from") or {}).get("step", 0))


def _read(path: Path, fields: Sequence[str], types: dict[str, type]) -> pd.DataFrame:
    """A file of :class:`Recorder`'s rows; columns that ``types`` does not name hold numbers. Those of ``MONITORED`` and
    ``END_OF_BLOCK`` are empty where the file is older than they are."""
    text = path.read_text() if path.exists() else ""
    text = text[: text.rfind("\n") + 1]  # a row that was cut off, by a full disk say, is no row
    if not text:
        return pd.DataFrame(columns=list(fields))
    types = {field: types.get(field, float) for field in fields}
    rows = pd.read_csv(io.StringIO(text), dtype=types)
    if tuple(rows) not in (tuple(fields), tuple(field for field in fields if field not in (*MONITORED, *END_OF_BLOCK))):
        raise ValueError(f"{path.name} has columns {', '.join(map(str, rows))}")
    return rows.reindex(columns=list(fields))


def find_runs(folders: Sequence[Path]) -> list[Run]:
    """Returns all runs at and below ``folders``, in natural order of their paths (2 before 10)."""
    paths: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise InputError("folder", folder, "no such folder")
        here = sorted((path.parent for path in folder.rglob(RESULT)), key=_natural)
        if not here:
            raise InputError("folder", folder, f"holds no run: no {RESULT} in it or below")
        paths.update(dict.fromkeys(path.resolve() for path in here))
    common = Path(os.path.commonpath(list(paths)))
    return [read_run(path, str(path.relative_to(common)).removeprefix(".")) for path in paths]


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sort key: a folder named by a job number sorts by that number."""
    leading = [(re.match(r"\d+", part), part) for part in path.parts]
    return [(int(number.group()) if number else -1, part) for number, part in leading]
