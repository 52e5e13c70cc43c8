"""The resolver ``free`` of output folders: ``${free:outputs/%Y-%m-%d/%H-%M-%S}``."""

import itertools
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from omegaconf import OmegaConf


def free(pattern: str) -> str:
    """Makes a folder that did not exist, and returns its path: two runs that begin in one second get two. ``pattern``
    is for ``strftime``; the second folder of a second has ``-2`` after it."""
    name = datetime.now().strftime(pattern)
    with suppress(OSError):  # the program that writes there says why it cannot
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            path = Path(name if number == 1 else f"{name}-{number}")
            with suppress(FileExistsError):
                path.mkdir()
                return str(path)
    return name


# Cached as Hydra's own ${now:...} is, so that all configurations of a sweep have the same.
OmegaConf.register_new_resolver("free", free, use_cache=True, replace=True)
