"""A file or folder that one process holds, so that no other runs the same race at the same time."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)


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
