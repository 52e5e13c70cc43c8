"""The page in words: the verdicts, what to do about a cause, and how to read the numbers."""

import math
import re
from dataclasses import dataclass
from functools import cache

from markdown_it import MarkdownIt
from markupsafe import Markup, escape

from mpcompare.numerals import as_ratio
from mpcompare.paths import DIFFERS
from mpcompare.report import answers as questions
from mpcompare.report.comparison import Comparison, Entry
from mpcompare.report.outputs.page.checks import CheckedRun
from mpcompare.verdict.judge.word import Word

_MARKDOWN = MarkdownIt("commonmark", {"html": False})


@dataclass(frozen=True)
class VerdictWords:
    """The verdict on a run."""

    label: str  # the name of the run in its comparison
    word: Word  # the verdict in a word or three
    more: str  # the rest of the sentence, with what was compared and why; may be empty
    unchecked: str = ""  # what could not be checked; may be empty
    anchor: str = ""  # the anchor of the check that decided; empty where none failed
    cause: str = ""  # the cause of a run that differs, else empty

    @property
    def advice(self) -> Markup:
        """The meaning of the cause and the advice, as HTML; empty where nothing differs."""
        return advice(self.cause)


def answers(comparison: Comparison) -> list[VerdictWords]:
    """Returns the verdicts on the runs of a comparison, what differs first."""
    return [_answer(comparison, entry) for entry in sorted(comparison.entries, key=lambda entry: entry.word.rank)]


def _answer(comparison: Comparison, entry: Entry) -> VerdictWords:
    if not entry.ok or (verdict := entry.verdict) is None:
        return VerdictWords(entry.label, entry.word, f": {entry.run.result.status}: {entry.error}")
    reference, checked = comparison.reference(entry), CheckedRun(entry)
    other = reference.label if reference else verdict.reference or ""
    failed, count = checked.first_failed, len(checked.bars)
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
            more = f": {comparison.of_reference(entry)}; it passed the {count} checks that need no other run"
            more += f"; {verdict.because}" if verdict.because else ""
        case _:
            more = f": {verdict.cause}: {verdict.because}" if verdict.cause else ""
    more += f"; {verdict.sees}" if verdict.sees and verdict.word is not Word.DIFFERS else ""
    cause = verdict.cause if verdict.word is Word.DIFFERS else ""
    anchor = failed.anchor if failed else ""
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


def glance(comparison: Comparison) -> list[tuple[str, Markup]]:
    """Returns the three questions of a report, and their answers as HTML."""
    name = Markup("<strong>{}</strong>").format
    lines = ((each.question, each.lines(name, escape)) for each in questions.answers(comparison))
    return [(question, Markup("<br>\n").join(map(Markup, answer))) for question, answer in lines]


def reading(comparison: Comparison) -> list[str]:
    """Returns a line for each thing that a reader meets first; the example is a run that is no baseline."""
    entries = comparison.finished
    example = next((entry for entry in entries if not entry.is_baseline and entry.baseline), None)
    said = ["Each run trained the same network on the same batches; red is what differs, and stands first."]
    if example is None:
        return said
    label, baseline = example.label, comparison.label(example.baseline)
    time, memory = example.time_ratio, example.memory_ratio
    if math.isfinite(time.low):
        turns = "It is the median over pairs of blocks that took turns, and may not be the ratio of the two medians."
        said.append(
            f"Time: a step of {label} takes {as_ratio(time.median)} times as long as one of {baseline}. The true ratio "
            f"lies between {as_ratio(time.low)} and {as_ratio(time.high)} in 95 of 100 such measurements. Below 1 is "
            "faster. " + (turns if example.side_by_side else "The two took no turns, so drift of the machine is in it.")
        )
    else:
        said.append(f"Time: the ratio of {label} has no interval here, so it is not shown.")
    said.append(f"Memory: a step of {label} needs {as_ratio(memory)} times the peak of {baseline}. Below 1 is smaller.")
    if (verdict := example.verdict) and verdict.checks:
        failed = sum(not check.passed for check in verdict.checks)
        said.append(
            f'Verdict: {label} is "{example.word}": {failed} of its {len(verdict.checks)} checks failed. '
            "A check compares one number with a limit."
        )
    return said


def advice(cause: str) -> Markup:
    """Returns the section of a cause; empty if there is none."""
    text = _MARKDOWN.render(_sections().get(cause, ""))
    return Markup(text.replace("<pre>", '<pre tabindex="0">'))  # the project's own document, without raw HTML


@cache
def _sections() -> dict[str, str]:
    """Returns the text of each section of the third level, by its heading."""
    text = re.sub(r"<!--.*?-->", "", DIFFERS.read_text(encoding="utf-8"), flags=re.DOTALL)
    below = re.split(r"^### (.+)$", text, flags=re.MULTILINE)[1:]
    ends = (re.split(r"^## ", body, flags=re.MULTILINE)[0] for body in below[1::2])
    return dict(zip(below[::2], ends, strict=True))
