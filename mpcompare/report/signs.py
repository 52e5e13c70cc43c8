"""The verdict on a run in a word or three, with a sign, a colour and a rank: for figures and the page."""

from mpcompare.report.comparison import Entry
from mpcompare.report.runs import UNREADABLE
from mpcompare.verdict.judge.verdict import Verdict

# A sign for each verdict, so that colour is not all that tells them apart.
SIGNS = {
    "same": "✓",
    "differs as declared": "≠",
    "differs": "✗",
    "reference": "=",
    "reference in doubt": "?",
    "did not finish": "!",
    "cannot be read": "!",
    "not examined": "-",
}
# The classes of verdicts that have a colour of their own, and the colours.
KINDS = {
    "same": "same",
    "differs": "differs",
    "did not finish": "differs",
    "cannot be read": "differs",
    "reference in doubt": "near",
    "not seen": "near",
}
COLOURS = {"same": "#00664b", "differs": "#a83a00", "near": "#7a5200", "other": "0.3"}
VOUCHED = ("same", "differs as declared", "within noise", "reference")


def word(entry: Entry, verdict: Verdict | None) -> str:
    """Returns the verdict on a run in a word or three."""
    if not entry.ok or verdict is None:
        return "cannot be read" if entry.run.result["status"] == UNREADABLE else "did not finish"
    return str(verdict) if verdict.in_doubt else verdict.word


def sign(said: str) -> str:
    """Returns the sign of a verdict in words."""
    return SIGNS.get(said, "?")


def kind(entry: Entry, verdict: Verdict | None) -> str:
    """Returns the class of a verdict, which has a colour."""
    return KINDS.get(word(entry, verdict), "other")


def rank(entry: Entry, verdict: Verdict | None) -> int:
    """Returns the place of a run in lists: what differs comes first, then what failed, then what nobody can vouch
    for."""
    if word(entry, verdict) == "differs":
        return 0
    return 1 if kind(entry, verdict) == "differs" else 3 if word(entry, verdict) in VOUCHED else 2
