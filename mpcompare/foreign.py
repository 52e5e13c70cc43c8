"""Files that anybody may have written: pipes, devices, files of any size, texts that steer a terminal, programs. And
packages of others, which may not be installed."""

import json
import os
import re
import stat
import sys
from importlib import metadata
from importlib.machinery import ModuleSpec
from itertools import accumulate
from pathlib import Path
from typing import Any

LARGEST = 256 * 2**20  # bytes of a file that is read as a whole: steps.csv of millions of steps
DEEPEST = 50  # levels of lists and tables within each other; a record of ours has about ten
_NAME = r"[^\s\\/,;:()\"']+"
# The folders of an absolute path: it begins at home or at a drive, or at the root with a folder at least.
_FOLDERS = re.compile(rf"(?<![\w/.:])(?:(?:file://|~|[A-Za-z]:)(?:[\\/]{_NAME})*|(?:[\\/]{_NAME})+)[\\/](?={_NAME})")


def read_bytes(path: Path) -> bytes:
    """Returns what a file holds. Raises OSError where it cannot be read, and ValueError where it is no regular file (a
    read from a pipe may wait for ever), or larger than ``LARGEST``."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path.name} is no regular file")
    if status.st_size > LARGEST:
        raise ValueError(f"{path.name} has {status.st_size} bytes, and {LARGEST} are read at most")
    with path.open("rb") as file:
        return file.read(LARGEST)


def read_json(path: Path) -> Any:
    """Returns the value of a JSON file, its texts as :func:`printable` ones. Raises errors as :func:`read_bytes` and
    :func:`parsed` do."""
    value = parsed(data := read_bytes(path))
    plain = b"\\" not in data and data.decode().replace("\n", "").replace("\t", "").isprintable()
    return value if plain else printable(value)


def parsed(data: bytes) -> Any:
    """Returns the value that JSON of anybody describes. Raises ValueError where it is no JSON, or lists and tables lie
    deeper within each other than ``DEEPEST``."""
    try:
        value = json.loads(data.decode())
        if _is_deep(value, DEEPEST):
            raise RecursionError
    except RecursionError:
        raise ValueError(f"lists or tables lie more than {DEEPEST} deep within each other") from None
    return value


def _is_deep(value: Any, levels: int) -> bool:
    level = [value]
    for _ in range(levels + 1):
        inner = (each.values() if isinstance(each, dict) else each if isinstance(each, list) else () for each in level)
        level = [child for children in inner for child in children]
        if not level:
            return False
    return True


def printable(value: Any) -> Any:
    """Returns a JSON value with every character that is not printed, but for line breaks and tabs, as its escape: such
    characters steer a terminal, or let text run backwards."""
    if isinstance(value, str):
        return "".join(each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in value)
    if isinstance(value, dict):
        return {printable(key): printable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [printable(each) for each in value]
    return value


def without_folders(text: str) -> str:
    """Returns a text in which the name alone is left of each absolute path: nobody else has these folders."""
    return _FOLDERS.sub("", text)


def spec_of(module: str) -> ModuleSpec | None:
    """Returns where Python finds a module; None where it finds none. ``importlib.util.find_spec`` would import the
    packages around it."""
    path, spec = None, None
    for name in accumulate(module.split("."), "{}.{}".format):
        found = (finder.find_spec(name, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next(filter(None, found), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec


def version(package: str) -> str | None:
    """Returns the version of an installed package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_private(path: Path) -> None:
    """Raises ValueError if somebody else could have written a file, or can put another in its place: the file, or a
    folder above it, belongs to another user or can be written by others.

    A folder like ``/tmp``, in which nobody can move the files of others, is none of these. A folder of a group that has
    its user's number is none of these: the user is alone in the group.
    """
    for each in (path, *path.resolve().parents):
        status = each.stat()
        others = stat.S_IWOTH | (0 if status.st_gid == status.st_uid else stat.S_IWGRP)
        sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        if status.st_uid not in (0, os.getuid()) or (status.st_mode & others and not sticky):
            raise ValueError(f"{each} can be written by others")
