"""The tables of real bugs in loops that a watch has seen, for docs/watched_bugs.md."""

from pathlib import Path

import pandas as pd
from summaries import markdown


def watched_bugs(file: Path) -> str:
    """Returns what a watch says of the drawn bugs in the loops of others, and how many it flags and names."""
    bugs = pd.read_csv(file, dtype=str, keep_default_na=False)
    counts = {name: int((bugs[name] == "yes").sum()) for name in ("flagged", "named anywhere")}
    shown = pd.DataFrame(
        {
            "bug": "[" + bugs["id"] + "](" + bugs["link"] + ")",
            "loop": bugs["loop"] + ", " + bugs["precision"],
            "what the watch says": bugs["all causes"].where(bugs["all causes"] != "", bugs["verdict"]),
            "by a fair name": bugs["named anywhere"],
            "refused with what was meant": (bugs["expected"] == "refused").map({True: "yes", False: "no"}),
        }
    )
    said = f"Of {len(bugs)} bugs {counts['flagged']} are flagged, {counts['named anywhere']} by a fair name.\n\n"
    return said + markdown(shown)


def twinned_draw(file: Path) -> str:
    """Returns what a watch says of a draw of bugs with right twins, and how many it flags, names and refuses."""
    bugs = pd.read_csv(file, dtype=str, keep_default_na=False)
    flagged, fair, refused = bugs["flagged"] == "yes", bugs["fair name"] == "yes", bugs["refused"] != ""
    defect = bugs["kind"] == "defect"
    link = "https://github.com/" + bugs["thread"].str.replace("#", "/issues/")
    words = {True: "yes", False: "no"}
    shown = pd.DataFrame(
        {
            "bug": "[" + bugs["thread"].str.rpartition("/")[2] + "](" + link + ")",
            "what": bugs["what"],
            "kind": bugs["kind"],
            "what the watch says": bugs["cause"].where(flagged, bugs["verdict"]),
            "by a fair name": fair.map(words),
            "refused with what was meant": refused.map(words),
        }
    )
    accused, twins_refused = (bugs["twin"] != "no defect").sum(), (bugs["twin refused"] != "").sum()
    said = (
        f"Flagged are {(defect & flagged).sum()} of {defect.sum()} defects, {(defect & fair).sum()} of them by a fair "
        f"name, and {(~defect & flagged).sum()} of {(~defect).sum()} facts. Refused with what was meant are "
        f"{(~defect & refused).sum()} of the facts. Of {len(bugs)} right twins {accused} have a defect, and "
        f"{twins_refused} are refused.\n\n"
    )
    return said + markdown(shown)
