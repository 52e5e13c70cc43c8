"""The files of a public data set: they are looked for on disk, checked, and downloaded by torchvision."""

import hashlib
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpcompare.errors import InputError, check_number
from mpcompare.foreign import version
from mpcompare.paths import data_root
from mpcompare.tasks.data.dataset import Dataset

log = logging.getLogger(__name__)

PROBE_S = 3
PROBE = """import http.client, sys, urllib.request
try:
    urllib.request.urlopen(sys.argv[1])
except (OSError, ValueError, http.client.HTTPException) as error:  # URLError is an OSError
    sys.exit(str(getattr(error, "reason", error)))
"""


@dataclass(frozen=True)
class Source:
    """A data set's files."""

    name: str  # the data set's name
    reader: str  # the class in ``torchvision.datasets`` that reads the data set
    folder: str  # the files' folder below ``data.root``
    md5: Mapping[str, str]  # the checksum of each file, by its name
    mirror: str  # an address that answers where a download can work
    script: str  # Python code that downloads into the folder ``sys.argv[1]``
    normalise: Callable[[Any], Tensor]  # maps torchvision's pixels, uint8, to fp32 ``[N, channels, height, width]``

    def on_disk(self, root: Path) -> bool:
        """Returns whether ``root`` holds any of the files. Then a missing or broken file is an error, and no reason to
        download."""
        return any((root / self.folder / name).exists() for name in self.md5)

    def check(self, root: Path) -> None:
        """Raises InputError unless every file is there and whole."""
        for name, expected in self.md5.items():
            path = root / self.folder / name
            try:
                content = path.read_bytes()
            except OSError as error:
                raise InputError("data.root", root, f"cannot read {path}: {error.strerror}") from error
            found = hashlib.md5(content, usedforsecurity=False).hexdigest()
            if found != expected:
                said = f"{len(content)} bytes, MD5 {found}, not {expected}"
                raise InputError("data.root", root, f"{path} is truncated or not {self.name}'s ({said})")

    def read(self, root: Path, reason: str) -> Dataset:
        """Returns the data set, whose files are below ``root``; ``reason`` says why it was taken. Raises InputError
        where a file is missing or broken, or torchvision does not work with this torch."""
        self.check(root)
        try:
            from torchvision import datasets
        except (ImportError, RuntimeError, AttributeError) as error:  # it was built for another torch, or is missing
            expected = f"does not work with torch {torch.__version__} ({' '.join(str(error).split())}); install a "
            expected += "matching pair: pip install --upgrade torch torchvision"
            raise InputError("torchvision", version("torchvision") or "not installed", expected) from error
        tensors: list[Tensor] = []
        for train in (True, False):
            part = getattr(datasets, self.reader)(root=str(root), train=train, download=False)
            tensors += [self.normalise(part.data), torch.as_tensor(part.targets)]
        return Dataset(self.reader.lower(), reason, *tensors)

    def take(self, root: str | None, limit_s: float) -> Dataset | str:
        """Returns the data set where it is in the folder ``root`` or downloads into it within ``limit_s`` seconds, else
        the reason why that failed. Raises InputError as :meth:`read` and :func:`find_root` do."""
        root, folder = find_root(root)
        if self.on_disk(folder):
            return self.read(folder, f"found in {root}")
        return self.download(folder, limit_s) or self.read(folder, f"downloaded to {root}")

    def take_or_stand_in(
        self, option: str, root: str | None, limit_s: float, loudly: str, stand_in: Callable[[], Dataset]
    ) -> Dataset:
        """Returns the data set as :meth:`take` does, else the data in its place. The log names ``option``, the override
        that asked for it, and the stand-in ``loudly``, which says that it is not the data set."""
        check_number("data.download_limit_s", limit_s, above=0)
        taken = self.take(root, limit_s)
        if isinstance(taken, Dataset):
            log.info("%s: using %s, %s", option, self.name, taken.reason)
            return taken
        reason = f"{self.name} is not in {find_root(root)[0]} and cannot be downloaded ({taken})"
        log.warning("%s: using %s: %s", option, loudly, reason)
        return replace(stand_in(), reason=reason)

    def download(self, root: Path, limit_s: float) -> str | None:
        """Downloads the files to ``root``; returns the reason why that failed, or None.

        A probe comes first, so that a machine without internet loses 3 seconds at most. Both run in processes that can
        be ended: a name lookup may hang for longer than any timeout. The files come into a folder of their own in
        ``root``, and are moved into place one by one, so that no half file is ever taken for data.
        """
        if failure := _failure(PROBE, self.mirror, PROBE_S, "no answer"):
            return failure
        try:
            root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as folder:
                if failure := _failure(self.script, folder, limit_s, "not done"):
                    return failure
                (root / self.folder).mkdir(parents=True, exist_ok=True)
                for name in self.md5:
                    (Path(folder) / self.folder / name).replace(root / self.folder / name)
        except OSError as error:
            return str(error)
        return None


def _failure(script: str, argument: str, limit_s: float, late: str) -> str | None:
    """Runs Python code; returns the reason why it failed, or None."""
    command = [sys.executable, "-c", script, argument]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"{late} within {limit_s:g} s"
    except subprocess.CalledProcessError as error:
        return (error.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    return None


def find_root(root: object) -> tuple[str, Path]:
    """Returns the folder as it was named, and its path; None stands for ``paths.data_root``. Raises InputError where
    ``root`` is no name, or names a file."""
    if root is None:
        root = data_root()
    if not isinstance(root, str):
        raise InputError("data.root", root, "expected the name of a folder")
    folder = Path(root).expanduser()
    if folder.exists() and not folder.is_dir():
        raise InputError("data.root", root, "expected a folder, this is a file")
    return root, folder
