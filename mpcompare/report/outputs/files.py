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


def write_csv(folder: Path, name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows as CSV, with the columns of all of them, whole or not at all; no file if there are no rows."""
    if rows:
        write_atomically(path_in(folder, name), lambda path: pd.DataFrame(rows).to_csv(path, index=False))
