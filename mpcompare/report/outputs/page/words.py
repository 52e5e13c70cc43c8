"""The verdicts in words."""

from dataclasses import dataclass

from markupsafe import Markup, escape

from mpcompare.report import answers as questions
from mpcompare.report.comparison import Comparison, Entry
from mpcompare.report.contents import Verdicts
from mpcompare.report.outputs.page.checks import Checked, bars
from mpcompare.verdict.judge.verdict import Verdict

# A sign for each verdict, so that colour is not all that tells them apart.
SIGNS = {
    "no difference found": "✓",
    "differs as declared": "≠",
    "differs": "✗",
    "reference": "=",
    "did not finish": "!",
}
# The classes of elements that have a colour of their own.
KINDS = {"no difference found": "same", "differs": "differs", "did not finish": "differs"}


@dataclass(frozen=True)
class Answer:
    """The verdict on a run.

    Attributes:
        label: the name of the run in its comparison.
        word: the verdict in a word or three.
        more: the rest of the sentence, with what was compared and why; may be empty.
        unchecked: what could not be checked; may be empty.
        anchor: the anchor of the check that failed first, or came nearest to its limit; may be empty.
    """

    label: str
    word: str
    more: str
    unchecked: str = ""
    anchor: str = ""

    @property
    def sign(self) -> str:
        return SIGNS.get(self.word, "?")

    @property
    def kind(self) -> str:
        """The verdict as a class of elements."""
        return KINDS.get(self.word, "other")


def answers(comparison: Comparison, verdicts: Verdicts) -> list[Answer]:
    """Returns the verdicts on the runs of a comparison, in its order."""
    labels = {entry.run.name: entry.label for entry in comparison.entries}
    return [_answer(entry, verdicts.get(entry.run.name), labels) for entry in comparison.entries]


def _answer(entry: Entry, verdict: Verdict | None, labels: dict[str, str]) -> Answer:
    if not entry.ok or verdict is None:
        return Answer(entry.label, "did not finish", f": {entry.run.result['status']}: {entry.error}")
    other = labels.get(verdict.reference or "", verdict.reference or "")
    checked = Checked(entry, verdict, bars(entry.run.name, verdict.checks))
    nearest, count = checked.furthest, len(checked.bars)
    anchor = nearest.anchor if nearest else ""
    word = verdict.word
    match word:
        case "same":
            word, more = checked.word, f" from {other} in {count} checks"
        case "not seen":
            more = f": {verdict.cause}: {verdict.because}; no difference from {other} was found in {count} checks"
        case "within noise":
            more = f": its gradients cannot be seen; in {count} checks it cannot be told from {other}"
        case "differs":
            more = f" from {other}" if other != entry.label else ""
            detail = f" ({verdict.detail})" if verdict.detail else ""
            more += f": {verdict.cause}{detail}, because {verdict.because} ({checked.failed} of {count} checks failed)"
        case "differs as declared":
            more = f" from {other}: {verdict.cause}; no other difference was found in {count} checks"
        case "reference":
            more = f": others are compared with it; it passed the {count} checks that need no other run"
            more += f"; {verdict.because}" if verdict.because else ""
        case _:
            more = f": {verdict.cause}: {verdict.because}" if verdict.cause else ""
    more += f"; the examination {verdict.sees}" if verdict.sees and word != "differs" else ""
    return Answer(entry.label, word, more, ", ".join(verdict.unchecked), anchor)


def glance(comparison: Comparison, verdicts: Verdicts) -> list[tuple[str, Markup]]:
    """Returns the three questions of a report, and their answers as HTML."""
    name = Markup("<strong>{}</strong>").format
    return [(each.question, Markup(each.text(name, escape))) for each in questions.answers(comparison, verdicts)]
