"""Values that the entrants of a race share: the first to ask computes one, and the others map it from its file."""

import copy
import logging
import pickle
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.serialization import config

from mpcompare.records import write_atomically

log = logging.getLogger(__name__)

T = TypeVar("T")
LARGE = 1 << 25  # bytes from which on a value is put aside into a file


class Shared:
    """Values by name, in a folder.

    Values are tensors on the CPU, numbers, strings and None, in dicts, lists and tuples of any depth. Their tensors are
    mapped from the file: all processes have one copy in memory, as long as none writes to it. One that does has a copy
    of its own of the pages that it wrote, and the others never see it.
    """

    def __init__(self, folder: Path | None) -> None:
        """``folder`` exists, and is the race's own; None: values are shared with nobody."""
        self.folder = folder
        self._warned = False

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Returns the value called ``name``, a file's name: another process has made it, or ``make`` makes it.

        A file is there whole or not at all. If the file can be neither written nor read, a warning says so, and this
        process has a value of its own.
        """
        if self.folder is None:
            return make()
        file = self.folder / f"{name}.pt"
        if file.exists():
            try:
                return _map(file)
            except _UNREADABLE as error:
                self._warn(name, error)
        value = make()
        try:
            write_atomically(file, lambda unfinished: save(value, unfinished))
            return _map(file)  # the tensors that were saved are freed
        except _UNREADABLE as error:
            self._warn(name, error)
        return value

    def once_written(self, name: str, write: Callable[[Path], object]) -> Any:
        """Returns the value called ``name``, as :meth:`once`, where ``write`` saves it in the file that it is given.
        Raises OSError where the file can be neither written nor read."""
        if self.folder is None:
            with tempfile.TemporaryDirectory(prefix="mpcompare-") as folder:
                write(file := Path(folder) / f"{name}.pt")
                return torch.load(file, mmap=sys.platform == "linux", weights_only=True)
        file = self.folder / f"{name}.pt"
        if file.exists():
            with suppress(*_UNREADABLE):
                return _map(file)
        write_atomically(file, write)
        return _map(file)

    def aside(self, value: T) -> Callable[[], T]:
        """Puts a copy of a value aside for a while. Returns a function that gives a new copy each time.

        The copy lies in a file, which is gone with the function. Its tensors are in memory while somebody has them. A
        small value is copied in memory. So is a value on another device, and any value where no file can be written.
        """
        if is_large(value):
            with suppress(*_UNREADABLE), tempfile.TemporaryDirectory(prefix="mpcompare-", dir=self.folder) as folder:
                save(value, path := Path(folder) / "aside.pt")
                file = path.open("rb")  # it has no name from here on
                return lambda: _map(Path(f"/proc/self/fd/{file.fileno()}"))
        copied = copy.deepcopy(value)
        return lambda: copy.deepcopy(copied)

    def _warn(self, name: str, error: Exception) -> None:
        if not self._warned:
            reason = " ".join(str(error).split())
            log.warning(f"this entrant has its own {name}: it cannot be shared with the others of the race ({reason})")
        self._warned = True


ALONE = Shared(None)


def is_large(value: Any) -> bool:
    """Returns whether the tensors of a value take less memory in a file: there are many bytes of them, on the CPU of a
    system that maps files."""
    tensors = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
    on_cpu = all(t.device.type == "cpu" for t in tensors)
    return on_cpu and sys.platform == "linux" and sum(t.nbytes for t in tensors) >= LARGE


# torch.save raises these errors on a full disk, and torch.load on a file that torch has not written.
_UNREADABLE = (OSError, RuntimeError, EOFError, pickle.UnpicklingError, KeyError, ValueError)


def save(value: Any, file: Path) -> None:
    """Saves a value without a checksum, which nobody reads."""
    with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
        torch.save(value, file)


def _map(file: Path) -> Any:
    return torch.load(file, mmap=True, weights_only=True)
