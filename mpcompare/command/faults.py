"""The faults of a run in one line: those that a user can mend, apart from those of this project."""

import errno
import sys
import traceback
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from mpcompare.errors import BackendUnavailable, InputError, first_line, one_line, want_of_memory

PACKAGES = ("torch", "torchvision", "numpy", "pandas", "scipy", "matplotlib", "rich", "jinja2", "hydra", "omegaconf")


def known_fault(error: BaseException) -> str | None:
    """Returns one line for what a user can change; None for a fault of this project, which deserves its traceback."""
    if isinstance(error, (InputError, BackendUnavailable, HydraException, OmegaConfBaseException)):
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
    files += [frame.filename for frame in traceback.extract_tb(error.__traceback__)]  # one that failed is in no table
    inside = (Path(file).resolve().relative_to(here).parts[0] for file in files if Path(file).is_relative_to(here))
    return sorted({name for name in inside if name.removesuffix(".py") in needed})
