"""The verdicts in words."""

from dataclasses import dataclass

from markupsafe import Markup, escape

from mpcompare.report import answers as questions
from mpcompare.report.comparison import Comparison, Entry
from mpcompare.report.contents import Verdicts
from mpcompare.report.outputs.page.advice import advice
from mpcompare.report.outputs.page.checks import CheckedRun, bars
from mpcompare.report.signs import word as word_of
from mpcompare.verdict.judge.verdict import Verdict
from mpcompare.verdict.judge.word import Word


@dataclass(frozen=True)
class VerdictWords:
    """The verdict on a run.

    Attributes:
        label: the name of the run in its comparison.
        word: the verdict in a word or three.
        more: the rest of the sentence, with what was compared and why; may be empty.
        unchecked: what could not be checked; may be empty.
        anchor: the anchor of the check that decided; empty where none failed.
        cause: the cause of a run that differs, else empty.
    """

    label: str
    word: Word
    more: str
    unchecked: str = ""
    anchor: str = ""
    cause: str = ""

    @property
    def advice(self) -> Markup:
        """What the cause means and what to do, as HTML; empty where nothing differs."""
        return advice(self.cause)


def answers(comparison: Comparison, verdicts: Verdicts) -> list[VerdictWords]:
    """Returns the verdicts on the runs of a comparison, what differs first."""
    labels = {entry.run.name: entry.label for entry in comparison.entries}
    known = [(entry, verdicts.get(entry.run.name)) for entry in comparison.entries]
    return [_answer(entry, verdict, labels) for entry, verdict in sorted(known, key=lambda each: word_of(*each).rank)]


def _answer(entry: Entry, verdict: Verdict | None, labels: dict[str, str]) -> VerdictWords:
    if not entry.ok or verdict is None:
        return VerdictWords(entry.label, word_of(entry, verdict), f": {entry.run.result['status']}: {entry.error}")
    other = labels.get(verdict.reference or "", verdict.reference or "")
    checked = CheckedRun(entry, verdict, bars(entry.run.name, verdict.checks))
    failed, count = checked.first_failed, len(checked.bars)
    anchor = failed.anchor if failed else ""
    match verdict.word:
        case Word.SAME:
            more = f" as {other} in {count} checks"
        case Word.NOT_SEEN:
            more = f": {verdict.cause}: {verdict.because}; no difference from {other} was found in {count} checks"
        case Word.WITHIN_NOISE:
            more = f": its gradients cannot be seen; in {count} checks it cannot be told from {other}"
        case Word.DIFFERS:
            more = f" from {other}" if other != entry.label else ""
            detail = f" ({verdict.detail})" if verdict.detail else ""
            more += f": {verdict.cause}{detail}, because {verdict.because} ({checked.failed} of {count} checks failed)"
        case Word.DIFFERS_AS_DECLARED:
            more = f" from {other}: {verdict.cause}; no other difference was found in {count} checks"
        case Word.REFERENCE:
            more = f": others are compared with it; it passed the {count} checks that need no other run"
            more += f"; {verdict.because}" if verdict.because else ""
        case _:
            more = f": {verdict.cause}: {verdict.because}" if verdict.cause else ""
    more += f"; the examination {verdict.sees}" if verdict.sees and verdict.word is not Word.DIFFERS else ""
    cause = verdict.cause if verdict.word is Word.DIFFERS else ""
    return VerdictWords(entry.label, verdict.said, more, ", ".join(verdict.unchecked), anchor, cause)


def baselines(comparison: Comparison) -> str:
    """Returns a line on what the runs are compared with."""
    labels = [entry.label for entry in comparison.finished if entry.is_baseline]
    count = f"{len(comparison.entries)} run{'s' if len(comparison.entries) > 1 else ''}"
    if not labels:
        return f"{count}."
    several = len(labels) > 1
    are, them = ("the baselines are", "them") if several else ("the baseline is", "it")
    return f"{count}; {are} {', '.join(labels)}: time, memory and losses are compared with {them}."


def glance(comparison: Comparison, verdicts: Verdicts) -> list[tuple[str, Markup]]:
    """Returns the three questions of a report, and their answers as HTML."""
    name = Markup("<strong>{}</strong>").format
    lines = ((each.question, each.lines(name, escape)) for each in questions.answers(comparison, verdicts))
    return [(question, Markup("<br>\n").join(map(Markup, answer))) for question, answer in lines]
