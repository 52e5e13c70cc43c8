"""The folders of runs: a free one, by the resolver ``${free:outputs/%Y-%m-%d/%H-%M-%S}``; one that can be written; and
one that a process holds, so that no other runs the same race at the same time."""

import fcntl
import itertools
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from omegaconf import OmegaConf

from mpcompare.errors import InputError
from mpcompare.records import check_unused

log = logging.getLogger(__name__)


def free(pattern: str) -> str:
    """Makes a folder that did not exist, and returns its path: two runs that begin in one second get two. ``pattern``
    is for ``strftime``; the second folder of a second has ``-2`` after it."""
    name = datetime.now().strftime(pattern)
    with suppress(OSError):  # the program that writes there says why it cannot
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            path = Path(name if number == 1 else f"{name}-{number}")
            with suppress(FileExistsError):
                path.mkdir()
                return str(path)
    return name


# Cached as Hydra's own ${now:...} is, so that all configurations of a sweep have the same.
OmegaConf.register_new_resolver("free", free, use_cache=True, replace=True)


def check_folder(field: str, name: str, below: bool) -> None:
    """Raises InputError if the folder cannot be written, or if it, or a folder ``below`` it, holds a run: two runs
    would be mixed."""
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        accepted = f"cannot write there ({error.strerror}); name a folder that can be written"
        raise InputError(field, name, accepted) from None
    check_unused(field, folder, below)


@contextmanager
def locked(path: Path, shared: bool = False) -> Iterator[None]:
    """Holds ``path`` until the block, or this process, ends. Waits as long as another process holds it. ``shared`` says
    whether others may hold it, too, who share it."""
    held = os.open(path, os.O_RDONLY)
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        try:
            fcntl.flock(held, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info(f"waiting for the process that holds {path}")
            fcntl.flock(held, kind)
        except OSError as error:  # a file system without locks: nobody is kept out
            log.debug(f"{path} cannot be locked ({error.strerror})")
        yield
    finally:
        os.close(held)
