"""The cache of torch.compile is ours, and holds no half of a compilation.

A compiler writes a library to the place where torch looks for it. One that is killed there leaves half a library, and
in the cache that all programs of a user share every later compilation would fail with it. Here files count only once
the run that wrote them has ended well: their names and sizes are listed then, and whatever else there is, is deleted.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from mpcompare.paths import cache_dir
from mpcompare.records import write_json

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


class Compiled:
    """The files of one cache, which one sweep at a time uses."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.list = folder, folder.with_suffix(".json")

    def forget(self) -> None:
        """Deletes the files that do not count."""
        counting = {}
        with suppress(OSError, ValueError):
            counting = json.loads(self.list.read_text())
        for name, size in self._sizes().items():
            if counting.get(name) != size:
                (self.folder / name).unlink(missing_ok=True)

    def keep(self) -> None:
        """Lets all files count that are there."""
        write_json(self.list, self._sizes())

    def _sizes(self) -> dict[str, int]:
        """Returns the bytes of each file, by its path in the cache."""
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)): path.stat().st_size for path in files}


@contextmanager
def compiled(within: Path | None = None) -> Iterator[Callable[[], None]]:
    """Gives the processes that are started in this block a cache; what they compile counts unless it raises.

    Args:
        within: the folder of a cache for this block alone, where another sweep uses ours; None: that of the system.

    Yields:
        A function that makes the cache forget what has not counted before: a process was killed, or failed.
    """
    if VARIABLE in os.environ:  # the user's own
        yield lambda: None
        return
    with ExitStack() as until_the_end:
        try:
            cache = Compiled(cache_dir() / "compiled")
            cache.folder.mkdir(parents=True, exist_ok=True)
            lock = until_the_end.enter_context(cache.folder.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            cache.forget()
        except OSError:
            cache = Compiled(Path(until_the_end.enter_context(TemporaryDirectory(dir=within))) / "compiled")
        os.environ[VARIABLE] = str(cache.folder)
        until_the_end.callback(os.environ.pop, VARIABLE, None)
        yield cache.forget
        with suppress(OSError):
            cache.keep()
