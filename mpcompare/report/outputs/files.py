"""The files of a report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from mpcompare.records import write_atomically


def path_in(folder: Path, name: str) -> Path:
    """Returns the path of a file to be written; makes the folder if it is missing.

    Raises:
        OSError: the folder cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows as CSV, with the columns of all of them, whole or not at all."""
    write_atomically(path, lambda unfinished: pd.DataFrame(rows).to_csv(unfinished, index=False))
