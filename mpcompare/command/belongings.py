"""The belongings of a sweep: all processes that it starts, and its temporary files. None of them outlives it."""

import fcntl
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import process, resource_tracker
from pathlib import Path
from typing import Any

import psutil

from mpcompare.command import warden
from mpcompare.command.compiled import compiled
from mpcompare.interrupt import uninterrupted

log = logging.getLogger(__name__)

PREFIX = "mpcompare-sweep-"
ENTRANT = "MPCOMPARE_ENTRANT"  # the variable that names its entrant to each program that the entrant starts
YOUNG_S = 60  # a younger folder may not be locked yet
LONGEST = 60  # characters of a folder in which sockets can be made: 107 with the names of the sweep and of a socket


class Belongings:
    """The belongings of one sweep. ``folder`` is for temporary files, and its name marks the processes."""

    def __init__(self, folder: Path, forget: Callable[[], None]) -> None:
        """``forget`` deletes what was compiled and does not count yet."""
        self.folder, self.forget = folder, forget

    def end_orphans(self, entrant: str | None = None) -> None:
        """Ends the programs that an entrant has started and left: they do not descend from this process any more. None:
        no entrant is there any more, and all that they have left is ended."""
        for each in warden.marked(self.folder):
            with suppress(psutil.Error):
                is_meant = entrant in (None, each.environ().get(ENTRANT))
                if is_meant and os.getpid() not in (parent.pid for parent in each.parents()):
                    each.kill()

    @contextmanager
    def shared(self, beside: Path) -> Iterator[Path | None]:
        """Makes a folder in ``beside`` for the values that entrants share (``shared.py``); yields None if it cannot."""
        try:
            folder = Path(tempfile.mkdtemp(dir=beside, prefix=warden.SHARED)).resolve()
            (self.folder / folder.name).symlink_to(folder)
        except OSError as error:
            log.warning(f"the entrants of this race share nothing: {error}")
            yield None
            return
        try:
            yield folder
        finally:
            with uninterrupted():
                shutil.rmtree(folder, ignore_errors=True)
                (self.folder / folder.name).unlink(missing_ok=True)


@contextmanager
def belongings() -> Iterator[Belongings]:
    """Marks the processes that are started in this block; when it ends, or this process does, none of them is left."""
    _tidy()
    resource_tracker.ensure_running()  # it belongs to this process, and other sweeps need it
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_root()))
    ours: dict[str, Any] = process.current_process()._config  # type: ignore[attr-defined]
    before = {name: os.environ.get(name) for name in (warden.MARK, "TMPDIR")}, ours.get("tempdir")
    with (folder / warden.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        command = [sys.executable, warden.__file__, str(folder)]
        watching = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        os.environ |= {warden.MARK: str(folder), "TMPDIR": str(folder)}
        ours["tempdir"] = str(folder)  # for the sockets of multiprocessing
        try:
            with compiled(folder) as forget:
                yield Belongings(folder, forget)
        finally:
            with uninterrupted():
                for name, value in before[0].items():
                    os.environ.pop(name, None)
                    os.environ |= {} if value is None else {name: value}
                ours["tempdir"] = before[1]
                watching.communicate()


def _root() -> Path:
    """Returns the folder of temporary folders: TMPDIR, or /tmp where that is too long."""
    root = Path(tempfile.gettempdir()).resolve()
    return root if len(str(root)) <= LONGEST else Path("/tmp").resolve()


def _tidy() -> None:
    """Clears up after sweeps that were killed together with their wardens."""
    for folder in _root().glob(f"{PREFIX}*"):
        with suppress(OSError), (folder / warden.LOCK).open() as lock:
            if time.time() - folder.stat().st_mtime > YOUNG_S and folder.stat().st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError where its sweep is there
                warden.clear(folder)
