"""The tables of real bugs in loops that a watch has seen, for docs/watched_bugs.md.

A draw has a table that was made blind, and a later table of the mended watch. The page shows only the rows of the later
table that have changed.
"""

from collections.abc import Callable
from pathlib import Path

import pandas as pd
from summaries import markdown

WORDS = {True: "yes", False: "no"}


def watched_bugs(file: Path) -> str:
    """Returns what a watch says of the drawn bugs in the loops of others, and how many it flags and names."""
    bugs = _read(file)
    counts = {name: int((bugs[name] == "yes").sum()) for name in ("flagged", "named anywhere")}
    refused = (bugs["expected"] == "refused").sum()
    said = f"Of {len(bugs)} bugs {counts['flagged']} are flagged, {counts['named anywhere']} by a fair name, and "
    return f"{said}{refused} are refused with what was meant.\n\n" + _changed(file, _in_loops)


def twinned_draw(file: Path) -> str:
    """Returns what a watch says of a draw of bugs with right twins, and how many it flags, names and refuses."""
    bugs = _read(file)
    flagged, fair, refused = bugs["flagged"] == "yes", bugs["fair name"] == "yes", bugs["refused"] != ""
    defect = bugs["kind"] == "defect"
    accused = ~bugs["twin"].isin(("no defect", "gradients not seen"))
    twins_refused = (bugs["twin refused"] != "").sum()
    said = (
        f"Flagged are {(defect & flagged).sum()} of {defect.sum()} defects, {(defect & fair).sum()} of them by a fair "
        f"name, and {(~defect & flagged).sum()} of {(~defect).sum()} facts. Refused with what was meant are "
        f"{(~defect & refused).sum()} of the facts. Of {len(bugs)} right twins {accused.sum()} have a defect, and "
        f"{twins_refused} are refused.\n\n"
    )
    return said + _changed(file, _with_twins)


def _read(file: Path) -> pd.DataFrame:
    return pd.read_csv(file, dtype=str, keep_default_na=False)


def _changed(file: Path, shown: Callable[[pd.DataFrame], pd.DataFrame]) -> str:
    """Returns the table of a file: of a later table only the rows that differ from the blind table."""
    table = shown(_read(file))
    blind = file.with_stem(file.stem.replace("_mended", "_blind"))
    if blind != file:
        before = shown(_read(blind)).set_index("bug").reindex(table["bug"]).reset_index()
        table = table[(table != before).any(axis=1)]
    return markdown(table)


def _in_loops(bugs: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "bug": "[" + bugs["id"] + "](" + bugs["link"] + ")",
            "loop": bugs["loop"] + ", " + bugs["precision"],
            "what the watch says": bugs["all causes"].where(bugs["all causes"] != "", bugs["verdict"]),
            "by a fair name": bugs["named anywhere"],
            "refused with what was meant": (bugs["expected"] == "refused").map(WORDS),
        }
    )


def _with_twins(bugs: pd.DataFrame) -> pd.DataFrame:
    link = "https://github.com/" + bugs["thread"].str.replace("#", "/issues/")
    return pd.DataFrame(
        {
            "bug": "[" + bugs["thread"].str.rpartition("/")[2] + "](" + link + ")",
            "what": bugs["what"],
            "kind": bugs["kind"],
            "what the watch says": bugs["cause"].where(bugs["flagged"] == "yes", bugs["verdict"]),
            "by a fair name": bugs["fair name"],
            "refused with what was meant": (bugs["refused"] != "").map(WORDS),
        }
    )
