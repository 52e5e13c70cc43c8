"""The cache of torch.compile is ours, and holds no half of a compilation.

A compiler writes a library to the place where torch looks for it. If it is killed there it leaves half a library. In a
cache that all programs of a user share, every later compilation would fail with it. Here files count only once the run
that wrote them has ended well: their names and sizes are listed then, and all other files are deleted.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from mpcompare.paths import cache_dir
from mpcompare.records import write_json

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@contextmanager
def compiled(within: Path | None = None) -> Iterator[Callable[[], None]]:
    """Gives the processes that are started in this block a cache; what they compile counts unless the block raises.

    Args:
        within: the folder for a cache of this block alone, where another sweep uses ours; None: the system's folder.

    Yields:
        A function that deletes the files that do not count yet: for a process that was killed, or failed.
    """
    if VARIABLE in os.environ:  # the user's own
        yield lambda: None
        return
    with ExitStack() as until_the_end:
        try:
            cache = cache_dir() / "compiled"
            cache.mkdir(parents=True, exist_ok=True)
            lock = until_the_end.enter_context(cache.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _forget(cache)
        except OSError:
            cache = Path(until_the_end.enter_context(TemporaryDirectory(dir=within))) / "compiled"
        os.environ[VARIABLE] = str(cache)
        until_the_end.callback(os.environ.pop, VARIABLE, None)
        yield partial(_forget, cache)
        with suppress(OSError):
            write_json(cache.with_suffix(".json"), _sizes(cache))


def _forget(cache: Path) -> None:
    """Deletes the files of a cache that do not count."""
    counting = {}
    with suppress(OSError, ValueError):
        counting = json.loads(cache.with_suffix(".json").read_text())
    for name, size in _sizes(cache).items():
        if counting.get(name) != size:
            (cache / name).unlink(missing_ok=True)


def _sizes(cache: Path) -> dict[str, int]:
    """Returns the bytes of each file, by its path in the cache, without files that a compiler deletes meanwhile."""
    sizes = {}
    for folder, _, names in os.walk(cache):
        for path in (Path(folder, name) for name in names):
            with suppress(OSError):
                sizes[str(path.relative_to(cache))] = path.stat().st_size
    return sizes
