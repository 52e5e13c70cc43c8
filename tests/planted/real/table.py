"""The table of real bugs: a row a bug, kept as a file beside the page that shows it."""

import csv
import math
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from planted.real.registry import CORRECT, THEMES, RealBug

from mpcompare.verdict.judge.verdict import Verdict

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "real_bugs.md"
FIELDS = (
    "id", "link", "theme", "setting", "precision", "what", "fair", "verdict", "cause", "flagged", "named", "worst",
    "because", "read", "also", "commit",
)  # fmt: skip
Row = dict[str, str]


def file_of(table: str) -> Path:
    """Returns the file of a table: ``first``, or one that was taken later."""
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

    Updates that are right are left out: they reach their bound, which is one of single roundings.
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


def show(table: str) -> None:
    """Puts a table that is kept in a file onto the page, between its marks."""
    page, rows = PAGE.read_text(), read(table)
    for part, lines in (("totals", totals(rows)), ("rows", markdown(rows))):
        begin, end = marks(table, part)
        before, rest = page.split(begin)
        page = "\n\n".join([before + begin, "\n".join(lines), end + rest.split(end)[1]])
    PAGE.write_text(page)


def shown(table: str, part: str) -> list[str]:
    """Returns the lines of a table's part that stand on the page."""
    begin, end = marks(table, part)
    return PAGE.read_text().split(begin)[1].split(end)[0].strip().split("\n")


def marks(table: str, part: str) -> tuple[str, str]:
    """Returns the comments between which a part of a table stands on the page."""
    return f"<!-- {table} {part}: begin -->", f"<!-- {table} {part}: end -->"


def markdown(rows: Sequence[Row]) -> list[str]:
    """Returns the lines of the table of all bugs, theme by theme."""
    lines = ["| bug | what happens | training | verdict | worst | fair |", "|" + " --- |" * 6]
    for row in rows:
        verdict = f"differs: {row['cause']}" if row["flagged"] == "yes" else f"**{row['verdict']}**"
        if row["theme"] == CORRECT:
            fair = "right" if row["flagged"] == "no" else "**accused**"
            verdict = verdict.replace("*", "")
        else:
            fair = "yes" if row["named"] == "yes" else f"no: {row['fair']}"
        training = f"{row['setting']}, {row['precision']}"
        name = row["id"].removesuffix(", its defaults")
        cells = (f"[{name}]({row['link']})", row["what"], training, verdict, row["worst"], fair)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def totals(rows: Sequence[Row]) -> list[str]:
    """Returns the lines of the table of totals by theme."""
    lines = ["| theme | bugs | flagged | with a fair cause |", "|" + " --- |" * 4]
    for theme in (*THEMES, ""):
        of_theme = [row for row in rows if row["theme"] == theme or (not theme and row["theme"] != CORRECT)]
        if not of_theme:
            continue
        counts = [sum(row[field] == "yes" for row in of_theme) for field in ("flagged", "named")]
        lines.append(f"| {theme or 'all'} | {len(of_theme)} | {counts[0]} | {counts[1]} |")
    return lines
