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

import cattrs
import pandas as pd
from cattrs.strategies import configure_union_passthrough

from mpcompare import records
from mpcompare.errors import InputError
from mpcompare.fields import PARTS, TYPES, ConfigAtLeast, Finished, Result, check_field
from mpcompare.foreign import printable, read_bytes, read_json
from mpcompare.records import BLOCKS, COLUMNS, EVALS, NUMERICS, RESULT, STEPS, whole_lines
from mpcompare.typed import check_type, is_of, required
from mpcompare.verdict.findings import Findings, from_document

OBSERVED = ("dataset_fingerprint", "initial_weights")  # keys of a result that belong to the identity of its task
STEPS_ASKED = ("train.steps", "train.warmup_steps")  # fields that say how long training is
UNREADABLE = "unreadable"  # the status of a run whose files are not what a run writes


@dataclass(frozen=True)
class Run:
    """One run as its files tell it."""

    folder: Path  # the folder of the run
    name: str  # the end of the folder's path, as long as it takes to tell it from the other runs that were read
    result: Result  # ``result.json``
    steps: pd.DataFrame  # ``steps.csv``; no rows if no step was finished
    blocks: pd.DataFrame  # ``blocks.csv``, the timed blocks; no rows if nothing was timed
    findings: Findings | None = None  # ``numerics.json``; None if the run was not examined
    # ``evals.csv``, loss and accuracy on held-out samples, by step; no rows of a run that wrote none
    evals: pd.DataFrame = field(default_factory=lambda: no_rows(EVALS))

    @property
    def start(self) -> tuple[int, str] | None:
        """The step and the fingerprint of the weights at which training began; None for the initial weights."""
        resumed = self.result.resumed_from
        return (resumed.step, resumed.weights) if resumed else None

    @property
    def finished(self) -> Finished:
        """The result, for callers who ask only runs that finished."""
        assert isinstance(self.result, Finished)
        return self.result

    @property
    def race(self) -> str | None:
        """The name of the race in which the run was timed; None where it was alone, or was not timed."""
        return self.result.blocks.timing.race if self.result.blocks else None

    @cached_property
    def recorded(self) -> dict[str, Any]:
        """The known fields of all parts by their names in ``result.json``, as they stand there."""
        parts = (vars(part) for name in PARTS if (part := getattr(self.result, name)))
        return records.finite({**vars(self.result), **{name: value for part in parts for name, value in part.items()}})

    @cached_property
    def task_identity(self) -> dict[str, Any]:
        """Every field of the task, such as ``task.optimizer.lr``, the seed, ``STEPS_ASKED``, and ``OBSERVED``, unless
        the run failed before it knew them. Empty where the task itself is not known: of a record that cannot be
        read."""
        config, made = self.result.config, self.result.set_up
        if not config["task"]:
            return {}
        observed = {key: getattr(made, key) for key in OBSERVED} if made else {}
        named = records.named_fields("task", config["task"])
        length = {key: value for key, value in records.named_fields("train", config.get("train")).items()
                  if key in STEPS_ASKED}  # fmt: skip
        return {**named, **length, "seed": config.get("seed", self.result.seed), **observed}


def read_run(folder: Path, name: str = "") -> Run:
    """Reads a run folder. Raises InputError if a file in it is not what a run writes."""
    try:
        if not (folder / RESULT).exists():
            raise ValueError(f"{RESULT} is missing")
        result = result_of(read_json(folder / RESULT))
        steps, blocks, evals = (_read(folder / name) for name in (STEPS, BLOCKS, EVALS))
        examined = (folder / NUMERICS).exists()
        findings = from_document(records.numbers(read_json(folder / NUMERICS))) if examined else None
        _check_whole(result, steps, blocks)
    except Exception as error:  # whatever it is, the files are the cause
        said = str(error) if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {error}"
        raise InputError("folder", printable(str(folder)), f"not a readable run ({printable(said)})") from error
    return Run(folder, name or printable(folder.name), result, steps, blocks, findings, evals)


_converter = cattrs.Converter(detailed_validation=False)  # takes checked values; words such as inf become numbers
_converter.register_structure_hook(float, lambda value, _: float(value) if isinstance(value, str) else value)
configure_union_passthrough(bool | str | None, _converter)
_AT_START = required(Result)
_FINISHED = [key for name in Finished.__annotations__ if name in PARTS for key in required(PARTS[name])]


def result_of(document: Any) -> Result:
    """Returns the result that a document holds. A run that did not finish may have failed because of a field of another
    type: such fields are left out. Raises ValueError where it is no result, or a finished one has such a field."""
    records.check_format(RESULT, document)
    finished = document.get("status") == "ok"
    for key in (*_AT_START, *(_FINISHED if finished else ())):
        if key not in document:
            raise ValueError(f"{RESULT} has no {key}")
    for key in document if finished else ("status", "backend"):
        check_field(key, document[key])
    check_type("config", document["config"], ConfigAtLeast)
    known = {key: v for key, v in document.items() if key in _AT_START or is_of(v, TYPES.get(key, Any))}
    parts = {name: known if all(key in known for key in required(part)) else None for name, part in PARTS.items()}
    return _converter.structure({**known, **parts}, Finished if finished else Result)


def _check_whole(result: Result, steps: pd.DataFrame, blocks: pd.DataFrame) -> None:
    """Raises ValueError unless a run that finished has all rows of its steps and blocks."""
    if not isinstance(result, Finished):
        return
    train = result.config["train"]
    before = result.resumed_from.step if result.resumed_from else 0
    first, total = before + 1, train["warmup_steps"] + train["steps"]
    if not _is_counted(steps["step"], first, total):
        raise ValueError(f"{STEPS} does not hold the steps {first} to {total}")
    rounds = result.blocks.timing.rounds
    if not _is_counted(blocks["round"], 1, rounds):
        raise ValueError(f"{BLOCKS} does not hold the rounds 1 to {rounds}")


def _is_counted(numbers: pd.Series, first: int, last: int) -> bool:
    """Returns whether these are the numbers from ``first`` to ``last``, which may be more than memory holds."""
    return len(numbers) == max(last - first + 1, 0) and numbers.tolist() == list(range(first, last + 1))


def read_any(folder: Path, name: str = "") -> Run:
    """Reads a run folder, as :func:`read_run`. A folder that cannot be read is a run with the status ``UNREADABLE``,
    its reason, and as much of the record as can be had: a report has a row for it."""
    try:
        return read_run(folder, name)
    except InputError as error:
        reason = str(error).partition(": not a readable run ")[2].removeprefix("(").removesuffix(")")
    own = printable(folder.name)
    known: dict[str, Any] = {"backend": own, "precision": "", "task": None, "batch_size": None, "seed": None}
    with suppress(OSError, ValueError, TypeError):
        found = read_json(folder / RESULT)
        for key in (*known, "config", "sweep"):
            if key in found and is_of(found[key], TYPES[key]):
                known[key] = found[key]
    result = Result(**{"config": {"task": {}}, **known}, status=UNREADABLE, error=reason)
    return Run(folder, name or own, result, no_rows(STEPS), no_rows(BLOCKS))


def no_rows(name: str) -> pd.DataFrame:
    """Returns a table of a run, such as ``steps.csv``, that holds nothing."""
    return pd.DataFrame(columns=list(COLUMNS[name]))


def _read(path: Path) -> pd.DataFrame:
    """Returns a table that a :class:`RunRecorder` has written."""
    columns = COLUMNS[path.name]
    text = whole_lines(read_bytes(path).decode() if path.exists() else "")
    if not text:
        return no_rows(path.name)
    rows = pd.read_csv(io.StringIO(text), dtype=dict(columns))
    found, expected = [str(column) for column in rows], list(columns)
    if found != expected:
        lacks, more = ([each for each in a if each not in b] for a, b in ((expected, found), (found, expected)))
        said = [f"{verb} {', '.join(names)}" for verb, names in (("lacks", lacks), ("should not have", more)) if names]
        raise ValueError(f"{path.name} {' and '.join(said) or 'has its columns in another order'}")
    return rows


def find_runs(folders: Sequence[Path]) -> list[Run]:
    """Returns all runs at and below ``folders``, in natural order of their paths (2 before 10). Raises InputError where
    a folder is missing or holds no run, or no run can be read."""
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
    if all(run.result.status == UNREADABLE for run in runs):
        raise InputError("folder", runs[0].folder, f"not a readable run ({runs[0].result.error})")
    return runs


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sort key: a folder named by a job number sorts by that number."""
    leading = [(re.match(r"\d+", part), part) for part in path.parts]
    return [(int(number.group()) if number else -1, part) for number, part in leading]
