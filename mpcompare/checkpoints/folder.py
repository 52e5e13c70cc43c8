"""Several checkpoints in one folder, which one process at a time writes: the newest is always whole.

Whatever happens, a kill -9 or a power cut, a folder named ``step-000123`` holds a checkpoint that was written to its
end. A checkpoint that is being written or deleted has a name that starts with a dot; the next save removes its remains.
``step-000123.replaced`` is an older one of the same step, whole too, for the moment between two renames.
"""

import logging
import math
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError

from mpcompare.checkpoints.checkpoint import Checkpoint
from mpcompare.checkpoints.files import CONTENT, TENSORS, Unreadable, flush, read, write
from mpcompare.errors import InputError, check_whole
from mpcompare.records import CHECKPOINTS

log = logging.getLogger(__name__)

REPLACED = ".replaced"
_NAME = re.compile(rf"step-(\d{{6,}})({re.escape(REPLACED)})?")


def save(folder: Path, checkpoint: Checkpoint, keep: int = 2) -> Path:
    """Adds a checkpoint to ``folder``, which is made where it is missing, and returns its own folder.

    The checkpoint is on the disk when this returns. Only then older ones are deleted: the last ``keep - 1`` of them
    stay, so that for a moment there are ``keep + 1``. Checkpoints of later steps are deleted too: they belong to
    another course that training took from an earlier checkpoint, and would pass for the newest. Raises InputError
    where the checkpoint cannot be written. The checkpoints that were there stay then."""
    check_whole("keep", keep, at_least=1)
    path = folder / f"step-{checkpoint.step:06d}"
    unfinished = None
    try:
        if not folder.exists():
            folder.mkdir(parents=True)
            flush(folder.parent)
        _tidy(folder)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=folder))
        write(unfinished, checkpoint)
        unfinished.chmod(0o755)
        if path.exists():  # a folder that is not empty cannot be overwritten
            path.rename(path.with_name(path.name + REPLACED))
        unfinished.rename(path)
        flush(folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError("checkpoints", folder, f"cannot write there ({reason}); what was there stays") from error
    finally:
        if unfinished:
            shutil.rmtree(unfinished, ignore_errors=True)
    kept = [path, *_before(path)[: keep - 1]]
    for other in _all(folder):
        if other not in kept:
            if _step(other) > checkpoint.step:
                log.warning(f"deletes {other}: training went back to before it, and now comes from {path.name}")
            _delete(other)
    return path


def newest(folder: Path, before: float = math.inf) -> Path | None:
    """Returns the newest checkpoint in ``folder`` of a step below ``before``, not yet verified; None: there is none."""
    return next((path for path in _all(folder) if _step(path) < before), None)


def load(path: Path, older: bool = False, before: float = math.inf) -> Checkpoint:
    """Reads and verifies a checkpoint. Raises InputError where there is no checkpoint, or a file of it is damaged. The
    field is ``resume``.

    Args:
        path: one checkpoint; or a folder of checkpoints or of a run, whose newest checkpoint is meant.
        older: whether an older one will do if the newest is damaged. A warning then says which one was taken, and why.
        before: in a folder of several, checkpoints of this step and later are left out, unless there is no other.
    """
    faults: list[str] = []
    candidates = _candidates(path)
    if path not in candidates:
        candidates = [candidate for candidate in candidates if _step(candidate) < before] or candidates
    for candidate in candidates:
        try:
            checkpoint = read(candidate)
            if (step := _step(candidate)) not in (-1, checkpoint.step):
                raise Unreadable(f"its name says step {step}, and {CONTENT} says {checkpoint.step}")
        except Unreadable as error:
            faults.append(f"{candidate.name}: {error}")
            if not older:
                raise InputError("resume", path, faults[0]) from error
            continue
        if faults:
            log.warning(f"resume={path}: continues from the older {candidate.name}, because of {'; '.join(faults)}")
        return checkpoint
    raise InputError("resume", path, f"no checkpoint there can be read: {'; '.join(faults)}")


def _candidates(path: Path) -> list[Path]:
    """Returns the checkpoint that ``path`` means, then those before it; at least one."""
    try:
        if _step(path) >= 0 or any((path / name).exists() for name in (TENSORS, CONTENT)):
            checkpoints = [path, *_before(path)] if path.is_dir() else []
        else:
            inside = path / CHECKPOINTS
            checkpoints = _all(inside if inside.is_dir() else path)
    except OSError as error:
        raise InputError("resume", path, f"cannot be read ({error.strerror})") from error
    if not checkpoints:
        raise InputError("resume", path, "holds no checkpoint" if path.is_dir() else "no such folder")
    return checkpoints


def _all(folder: Path) -> list[Path]:
    """Returns the checkpoints of a folder, the newest first; a replaced one comes after the other of its step."""
    names = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(names, key=lambda path: (_step(path), not path.name.endswith(REPLACED)), reverse=True)


def _before(path: Path) -> list[Path]:
    """Returns the checkpoints of earlier steps in the same folder, the newest first."""
    return [other for other in _all(path.parent) if _step(other) < _step(path)]


def _step(path: Path) -> int:
    """Returns the step in a checkpoint's name; -1 where it has another name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _tidy(folder: Path) -> None:
    """Removes the remains of a killed save."""
    for leftover in folder.glob(".step-*"):
        with suppress(OSError):
            _remove(leftover)
    for replaced in folder.glob(f"step-*{REPLACED}"):
        if (path := replaced.with_name(replaced.name.removesuffix(REPLACED))).exists():
            _delete(replaced)
        else:
            replaced.rename(path)


def _delete(path: Path) -> None:
    """Deletes a checkpoint, under a name that says so: half of a checkpoint never looks like a whole one."""
    doomed = path.with_name(f".{path.name}-{os.urandom(4).hex()}")
    try:
        path.rename(doomed)
        _remove(doomed)
    except OSError as error:
        log.warning(f"cannot delete the old checkpoint {path} ({error.strerror})")


def _remove(path: Path) -> None:
    """Removes a folder, or a file that somebody put in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
