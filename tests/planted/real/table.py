"""The table of real bugs: a row a bug, kept as a file, which ``scripts/docs_numbers.py`` shows on its pages."""

import csv
import math
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from planted.real.registry import CORRECT, RealBug

from mpcompare.verdict.judge.verdict import Verdict

ROOT = Path(__file__).parents[3]
FIELDS = (
    "id", "link", "theme", "setting", "precision", "what", "fair", "verdict", "cause", "flagged", "named", "worst",
    "because", "read", "also", "commit",
)  # fmt: skip
Row = dict[str, str]


def file_of(table: str) -> Path:
    """Returns the file of a table: ``first``, ``second_draw`` and so on, or ``first_mended``, taken later."""
    return ROOT / "docs" / "real_bugs" / f"{table}.csv"


def commit() -> str:
    """Returns the commit that is checked out."""
    command = ["git", "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def row_of(bug: RealBug, verdict: Verdict, at: str) -> Row:
    """Returns the row of a verdict that was given at the commit ``at``."""
    flagged = verdict.word == "differs"
    return {
        "id": bug.id,
        "link": bug.link,
        "theme": bug.theme,
        "setting": bug.setting.name,
        "precision": bug.precision,
        "what": bug.what,
        "fair": ", ".join(bug.fair),
        "verdict": verdict.word,
        "cause": verdict.cause,
        "flagged": _yes(flagged),
        "named": _yes(flagged and verdict.cause in bug.fair),
        "worst": f"{worst(verdict):.3g}",
        "because": verdict.because,
        "read": bug.read,
        "also": ", ".join(bug.also),
        "commit": at,
    }


def worst(verdict: Verdict) -> float:
    """Returns the largest value of a check over its limit; inf where one is not a number, or must be 0 and is not.

    Right updates are left out: they reach their bound, because it bounds single roundings.
    """
    shares = [0.0]
    for check in verdict.checks:
        if check.name.startswith("update ") and check.passed:
            continue
        if check.limit > 0 and not math.isnan(check.value):
            shares.append(check.value / check.limit)
        elif not check.passed:
            shares.append(math.inf)
    return max(shares)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def write(rows: Iterable[Row], table: str) -> None:
    """Writes the file of a table, which must not be there yet."""
    file_of(table).parent.mkdir(exist_ok=True)
    with file_of(table).open("x", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read(table: str) -> list[Row]:
    with file_of(table).open(newline="") as file:
        return list(csv.DictReader(file))


def counted(rows: Sequence[Row]) -> str:
    """Returns in a line how many bugs are flagged and named, and how many entrants that are right are accused."""
    right, bugs = ([row for row in rows if (row["theme"] == CORRECT) == correct] for correct in (True, False))
    flagged, named = (sum(row[field] == "yes" for row in bugs) for field in ("flagged", "named"))
    accused = f"{sum(row['flagged'] == 'yes' for row in right)} of {len(right)} right ones accused"
    return f"{len(bugs)} bugs: {flagged} flagged, {named} with a fair cause; {accused}"
