"""The word that is said of a run, with or without a verdict, and the colours of words."""

from mpcompare.report.comparison import Entry
from mpcompare.report.runs import UNREADABLE
from mpcompare.verdict.judge.verdict import Verdict
from mpcompare.verdict.judge.word import Word

COLOURS = {"same": "#00664b", "differs": "#a83a00", "near": "#7a5200", "other": "0.3"}  # by ``Word.kind``


def word(entry: Entry, verdict: Verdict | None) -> Word:
    """Returns the verdict on a run in a word or three."""
    if not entry.ok:
        return Word.CANNOT_BE_READ if entry.run.result.status == UNREADABLE else Word.DID_NOT_FINISH
    return verdict.said if verdict else Word.NOT_EXAMINED
