"""The files of a report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from mpcompare.records import write_atomically
from mpcompare.typed import WORDS

FORMULA = ("=", "+", "-", "@", "\t", "\r")


def path_in(folder: Path, name: str) -> Path:
    """Returns the path of a file to be written; makes the folder if it is missing. Raises OSError where the folder
    cannot be made."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def write_csv(folder: Path, name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows as CSV, with the columns of all of them, whole or not at all; no file if there are no rows.

    A spreadsheet takes a text that begins with one of ``FORMULA`` for a formula, and computes what a stranger wrote: an
    apostrophe before it makes it a text.
    """
    if rows:
        table = pd.DataFrame([{key: _text(value) for key, value in row.items()} for row in rows])
        write_atomically(path_in(folder, name), lambda path: table.to_csv(path, index=False))


def _text(value: Any) -> Any:
    is_formula = isinstance(value, str) and len(value) > 1 and value.startswith(FORMULA) and value not in WORDS
    return f"'{value}" if is_formula else value
