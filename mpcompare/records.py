"""The files that a run writes: ``steps.csv``, a row a step, ``result.json``, everything else (report/runs.py reads)."""

import csv
import hashlib
import json
import math
import os
import platform
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from mpcompare.errors import InputError
from mpcompare.fields import check_field
from mpcompare.foreign import read_json
from mpcompare.typed import WORDS

FORMAT = 3  # the version of these files, from result.json on
MONITORED = ("grad_zero", "grad_subnormal", "grad_nonfinite", "lost_updates")  # empty in steps that are not
STEPS, EVALS, BLOCKS, NUMERICS, RESULT = "steps.csv", "evals.csv", "blocks.csv", "numerics.json", "result.json"
# The columns of the tables, in their order, with the type of their cells; a cell of a float may be empty.
COLUMNS: dict[str, dict[str, type]] = {
    STEPS: {
        "step": int, "warmup": bool, "loss": float, "lr": float, "loss_scale": float, "skipped": bool,
        "grad_norm": float, "clipped": bool, "step_ms": float, **dict.fromkeys(MONITORED, float),
    },
    EVALS: {"step": int, "test_loss": float, "test_accuracy": float},
    BLOCKS: {
        "round": int, "steps": int, "step_ms": float, "wall_ms": float, "clock_mhz": float, "other_cores": float,
        "throttle": str, "settled": bool, "cores_between_turns": float, "read_ms": float, "finished": bool,
        "s_between_turns": float, "cpu_s_between_turns": float, "seen_s": float, "longest_s": float,
        "messages_s": float,
    },
}  # fmt: skip
MOVES = "moves.json"  # in a run with checkpoints, until it is examined
CHECKPOINTS = "checkpoints"  # the name of a folder within the folder of a run
PLANNED = "planned"  # the status of a run that no process has begun
MACHINE = ("device_name", "host", "threads")  # keys of a result: the place where the run was
# Keys of a result that say how far a run has come: it was examined; timed; taken from a sweep that was killed.
EXAMINED, TIMES, WENT_ON = "module_dtypes", ("step_ms_p20", "error"), "went_on"


def write_atomically(path: Path, write: Callable[[Path], object], new: bool = False) -> None:
    """Lets ``write`` make a file next to ``path`` and moves it there: the new file is whole, or the old one stays.
    With ``new`` an old file raises FileExistsError: of two who write at one time, one succeeds."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    unfinished = Path(name)
    try:
        write(unfinished)
        unfinished.chmod(0o644)
        if new:
            with suppress(PermissionError):  # a file system without links
                os.link(unfinished, path)
                return
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def has_checkpoint(folder: Path) -> bool:
    """Returns whether a run in ``folder``, or below it, has written a checkpoint."""
    return any(folder.rglob(f"{CHECKPOINTS}/step-*"))


def check_unused(field: str, folder: Path, below: bool = False) -> None:
    """Raises InputError if ``folder``, or one ``below`` it, holds a run: nothing that was written is overwritten."""
    for file in (RESULT, STEPS):
        if found := next(folder.glob(f"**/{file}" if below else file), None):
            expected = f"already holds a run ({found}), and nothing is overwritten: name another folder"
            how = f"; resume={folder} goes on with it there" if has_checkpoint(folder) else ""
            raise InputError(field, folder, expected + how)


class RunRecorder:
    """Writes one run into ``folder``; a run that was killed leaves its finished steps and ``status: running``. Every
    method raises InputError where the folder cannot be written."""

    def __init__(self, folder: Path, result: dict[str, Any], goes_on: bool = False) -> None:
        """Writes ``result`` with status ``running``. Raises InputError if the folder already holds a run. If the run
        ``goes_on``, the folder holds its record so far, to which the result is added."""
        self.folder = folder
        if not goes_on:
            check_unused("hydra output folder", folder)
        before = json.loads((folder / RESULT).read_text()) if goes_on else {}
        self._write({**before, "status": "running", **result}, new=not goes_on)

    def append(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        """Appends rows to the table ``name``, one of ``COLUMNS``."""
        with self._writing(), (self.folder / name).open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS[name])
            if file.tell() == 0:
                writer.writeheader()
            writer.writerows(rows)

    def keep(self, last_step: int) -> list[dict[str, Any]]:
        """Leaves the steps and evaluations up to ``last_step``, and returns those steps: a run that goes on writes the
        others anew."""
        with self._writing():
            _keep(self.folder / EVALS, last_step)
            return _keep(self.folder / STEPS, last_step)

    def moves(self, document: dict[str, Any]) -> None:
        """Writes ``moves.json``: :class:`mpcompare.verdict.judge.moves.Moves` of the steps so far."""
        with self._writing():
            write_json(self.folder / MOVES, document)

    def numerics(self, document: dict[str, Any]) -> None:
        """Writes ``numerics.json``, the document of :mod:`mpcompare.verdict.findings`, which holds the moves too."""
        with self._writing():
            write_json(self.folder / NUMERICS, document)

    def add(self, **result: Any) -> None:
        """Adds to the result and writes it; raises InputError, too, if a field is not of its type. When the result says
        that the run was examined, ``moves.json`` is deleted: a run that is killed before goes on with it."""
        for name, value in finite(result).items():
            check_field(name, value)
        self._write({**self.result, **result})
        if EXAMINED in result:
            with self._writing():
                (self.folder / MOVES).unlink(missing_ok=True)

    def _write(self, result: dict[str, Any], new: bool = False) -> None:
        with self._writing():
            _write_result(self.folder, result, new)
        self.result = result  # entries that cannot be written do not stay, so later entries can be written

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except FileExistsError:
            check_unused("hydra output folder", self.folder)  # a run that began in the same moment
            raise
        except OSError as error:
            raise InputError("hydra output folder", self.folder, f"cannot write there ({error.strerror})") from error


def _keep(path: Path, last_step: int) -> list[dict[str, Any]]:
    """Leaves the rows up to ``last_step`` in a file of steps, and returns them; a file without rows is deleted."""
    reader = csv.DictReader(whole_lines(path.read_text() if path.exists() else "").splitlines())
    types = COLUMNS[path.name]
    rows = [row for each in reader if (row := _values(each, types))["step"] <= last_step]

    def write(unfinished: Path) -> None:
        with unfinished.open("w", newline="") as file:
            writer = csv.DictWriter(file, reader.fieldnames or ())
            writer.writeheader()
            writer.writerows(rows)

    if rows:
        write_atomically(path, write)
    else:
        path.unlink(missing_ok=True)
    return rows


def whole_lines(text: str) -> str:
    """Returns a text without a last line that was cut off, by a full disk say: such a row is no row."""
    return text[: text.rfind("\n") + 1]


def _values(row: dict[str, str], types: Mapping[str, type]) -> dict[str, Any]:
    """Returns a row as it was before it was written; a float is the same, bit for bit."""
    return {
        name: text == "True" if types[name] is bool else types[name](text) if text else None
        for name, text in row.items()
    }


def plan(folder: Path, at_start: dict[str, Any]) -> None:
    """Writes the record of a planned run, unless the folder has a record already. So a report has a row of the run,
    whatever becomes of its process."""
    if not (folder / RESULT).exists():
        _write_result(folder, {"status": PLANNED, **at_start})


def host() -> str:
    """Returns a hash of the machine's name, which tells machines apart in a record and does not say where they are."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def status(folder: Path) -> str | None:
    """Returns the status of the run in a folder; None where there is none, or it cannot be read."""
    try:
        return str(read_json(folder / RESULT)["status"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def wrong_inputs(folders: Iterable[Path]) -> list[str]:
    """Returns what is wrong with the input of each run. The list is empty where a run got further than its input. It is
    empty, too, where a record cannot be read: the report says so."""
    try:
        results = [read_json(folder / RESULT) for folder in folders]
        wrong = all(each["status"] == "failed" and each.get("wrong_input") for each in results)
        return [str(each["error"]) for each in results] if wrong else []
    except (OSError, ValueError, TypeError, KeyError):
        return []


def conclude(folder: Path, at_start: dict[str, Any], cause: str) -> bool:
    """Completes the record of a run whose process is gone: a run whose record says ``running`` or ``planned`` has
    failed for ``cause``. ``at_start`` has the first entries of its result, for a run that has not written them. Returns
    whether there was anything to complete."""
    path = folder / RESULT
    folder.mkdir(parents=True, exist_ok=True)
    result = read_json(path) if path.exists() else {"status": "running", **at_start}
    if result["status"] not in ("running", PLANNED):
        return False
    result.update(status="interrupted" if cause == "interrupted" else "failed", error=cause)
    _write_result(folder, result)
    return True


def explain(folder: Path, reason: str) -> None:
    """Adds the reason to the record of a run that was interrupted, where the record has no reason yet."""
    result = read_json(folder / RESULT)
    if result.get("error") == "interrupted":
        _write_result(folder, {**result, "error": f"interrupted: {reason}"})


def check_format(file: str | Path, result: Any) -> None:
    """Raises InputError unless a result has the version that is written today."""
    found = result.get("format_version") if isinstance(result, dict) else None
    if found != FORMAT:
        raise InputError("format_version", found, f"expected {FORMAT}: another version of mpcompare has written {file}")


def _write_result(folder: Path, result: dict[str, Any], new: bool = False) -> None:
    write_json(folder / RESULT, {"format_version": FORMAT, **result}, indent=2, new=new)


def write_json(path: Path, value: dict[str, Any], indent: int | None = None, new: bool = False) -> None:
    """Writes ``value`` whole or not at all; ``new`` as in :func:`write_atomically`."""
    text = json.dumps(finite(value), indent=indent, allow_nan=False) + "\n"
    write_atomically(path, lambda unfinished: unfinished.write_text(text), new)


def finite(value: Any) -> Any:
    """Dataclasses become tables. JSON has no inf and NaN: they become the strings ``inf``, ``-inf``, ``nan``, which
    ``float()`` reads back."""
    value = vars(value) if is_dataclass(value) else value
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
    return float(value) if value in WORDS else value
