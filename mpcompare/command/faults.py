"""Faults that a user can mend, in one line: faults of a run, and misspelt keys, with the keys that are like them."""

import difflib
import errno
import re
import sys
import traceback
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mpcompare.errors import BackendUnavailable, InputError, fail, first_line, one_line, want_of_memory
from mpcompare.paths import CONF

PACKAGES = ("torch", "torchvision", "numpy", "pandas", "scipy", "matplotlib", "rich", "jinja2", "hydra", "omegaconf")
WRONG_INPUT = (InputError, BackendUnavailable, HydraException, OmegaConfBaseException)
MOST = 3  # keys in a hint


def known_fault(error: BaseException) -> str | None:
    """Returns one line for what a user can change; None for a fault of this project, which deserves its traceback."""
    if isinstance(error, WRONG_INPUT):
        return one_line(str(error))
    if isinstance(error, SystemExit):
        return f"the network, its data, its loss or the backend called sys.exit({error})"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return one_line(f"cannot write {error.filename or 'a file'} ({error.strerror})")
    if isinstance(error, (ImportError, AttributeError)) and (names := _shadowing(error)):
        return f"{', '.join(names)} in {Path.cwd()} hides a module of that name: rename it ({first_line(error)})"
    return want_of_memory(error)


def _shadowing(error: BaseException) -> list[str]:
    """Returns the files and folders of the working directory that were imported in the place of Python's own modules,
    or of packages that mpcompare needs."""
    here, needed = Path.cwd().resolve(), {*sys.stdlib_module_names, *PACKAGES}
    files = [getattr(sys.modules.get(name), "__file__", None) or "" for name in needed]
    files += [frame.filename for frame in traceback.extract_tb(error.__traceback__)]  # a failed module is in no table
    inside = (Path(file).relative_to(here).parts[0] for file in files if Path(file).is_relative_to(here))
    return sorted({name for name in inside if name.removesuffix(".py") in needed})


def unknown_key(error: Exception) -> str | None:
    """Returns the line for an override of a key that is not there: keys that are like it, or how it is appended. None
    for another error.

    A key without its section is found too: ``batch_size`` is near ``task.batch_size``. The section of a key is not like
    it: ``task.model.width`` is appended to ``task.model``.
    """
    refused, cause = re.match("Could not override '([^']+)'", str(error)), error.__cause__
    if not refused or not isinstance(cause, OmegaConfBaseException) or cause.parent_node is None:
        return None
    root = cause.parent_node._get_root()
    defaults = OmegaConf.load(CONF / "config.yaml").defaults
    chosen = {name for each in defaults if OmegaConf.is_dict(each) for name in each}
    known = {name: name if name in chosen else f"+{name}" for name in _groups()} | {key: key for key in _keys(root)}
    if not (near := _near(refused[1], [key for key in known if not refused[1].startswith(f"{key}.")])):
        return one_line(str(error))
    return f"Could not override '{refused[1]}': did you mean {' or '.join(known[key] for key in near)}?"


def check_appended(overrides: Sequence[str], chosen: Collection[str]) -> None:
    """Raises InputError for ``+experment=...``: Hydra takes a misspelt group for a new key, which nobody reads.
    ``chosen`` are the groups of which an option is chosen, groups of plug-ins among them."""
    for override in overrides:
        name, _, value = override.partition("=")
        if not name.startswith("+") or name.lstrip("+") in chosen or "." in name:
            continue
        if near := difflib.get_close_matches(name.lstrip("+"), _groups(), n=1, cutoff=0.8):
            raise InputError(name, value, f"there is no such group (did you mean +{near[0]}?)")


def check_dashed(words: Sequence[str]) -> None:
    """Ends the program for ``--backend amp``: Hydra's options begin with dashes, and keys do not."""
    for word, after in pairwise((*words, "")):
        name, _, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name.split(".")[0] in {*_groups(), *OmegaConf.load(CONF / "config.yaml")}:
            own = after if "=" not in after and not after.startswith("-") else ""
            fail(f"{word}: write {name}={value or own or 'VALUE'}")


def _groups() -> list[str]:
    return sorted(path.name for path in CONF.iterdir() if path.is_dir())


def _keys(node: Any, before: str = "") -> Iterator[str]:
    """Yields the keys of a configuration, with dots."""
    if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
        for name in map(str, node):
            yield f"{before}{name}"
            yield from _keys(node._get_node(name), f"{before}{name}.")


def _near(key: str, known: Collection[str]) -> list[str]:
    """Returns the keys that end as ``key`` does; else the one spelt most nearly so, with or without sections."""
    if ends := [each for each in known if each.endswith(f".{key}")]:
        return sorted(ends, key=len)[:MOST]
    if whole := difflib.get_close_matches(key, known, n=1, cutoff=0.75):
        return whole
    last = {each.rpartition(".")[2]: each for each in sorted(known, key=len, reverse=True)}
    return [last[each] for each in difflib.get_close_matches(key.rpartition(".")[2], last, n=1, cutoff=0.75)]
