"""The folder that data is read from and downloaded to: ``data.root``."""

from pathlib import Path

from mpcompare.errors import InputError
from mpcompare.paths import data_root


def find_root(root: object) -> tuple[str, Path]:
    """Returns the folder as it was named, and its path; None stands for ``paths.data_root``.

    Raises:
        InputError: ``root`` is no name, or names a file.
    """
    if root is None:
        root = data_root()
    if not isinstance(root, str):
        raise InputError("data.root", root, "expected the name of a folder")
    folder = Path(root).expanduser()
    if folder.exists() and not folder.is_dir():
        raise InputError("data.root", root, "expected a folder, this is a file")
    return root, folder
