"""The three questions of a report and their answers: is it right, is it faster, is it smaller?

Answers are sentences about runs, whose names each output writes in its own way.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpcompare.numerals import as_ratio, short
from mpcompare.race.intervals import MIN_VALUES
from mpcompare.report import remarks
from mpcompare.report.comparison import Comparison, Entry
from mpcompare.report.runs import UNREADABLE, Run
from mpcompare.verdict.judge.verdict import Verdict
from mpcompare.verdict.judge.word import Word

MB = 1e6
# The note on a run that is fast or small, and is not the same.
BEWARE = {Word.DIFFERS: ", and does not compute the same", Word.DIFFERS_AS_DECLARED: ", and differs as declared"}
MOST = 4  # runs that a sentence names, or that have a sentence of their own
WORDS = 17  # words of a reason; the rest of the reason is shown elsewhere


class Name(str):
    """The label of a run within a sentence."""


Sentence = Sequence[str]  # pieces, some of which are a Name


@dataclass(frozen=True)
class Answer:
    """A question and its answer."""

    question: str
    sentences: Sequence[Sentence]

    def lines(self, name: Callable[[str], str] = str, rest: Callable[[str], str] = str) -> list[str]:
        """Returns the sentences, with each name and each other piece as these functions write it."""
        return ["".join(name(p) if isinstance(p, Name) else rest(p) for p in sentence) for sentence in self.sentences]


def about(entries: Sequence[Entry], one: str, several: str | None = None, *more: str) -> list[Sentence]:
    """Returns a sentence about runs, as ``a, b and 3 more differ``; none where there are no runs.

    Args:
        one: what is said of one run.
        several: what is said of more than one; None for the same.
        more: pieces that follow.
    """
    if not entries:
        return []
    shown = entries if len(entries) <= MOST else entries[: MOST - 1]
    names: list[str] = [Name(entry.label) for entry in shown]
    if len(shown) < len(entries):
        names.append(f"{len(entries) - len(shown)} more")
    pieces = [piece for name in names for piece in (name, ", ")][:-1]
    if len(names) > 1:
        pieces[-2] = " and "
    return [(*pieces, one if len(entries) == 1 or several is None else several, *more)]


def first_clause(because: str) -> str:
    """Returns the beginning of a reason as the end of a sentence."""
    return _beginning(re.split(r"(?:: |; | \()", because, maxsplit=1)[0])


def _beginning(text: str) -> str:
    words = text.split()
    return " ".join(words[:WORDS]) + (" ..." if len(words) > WORDS else ".")


def answers(comparison: Comparison) -> list[Answer]:
    """Returns the answers on a comparison, each with what matters most first."""
    if not comparison.finished:
        return [Answer("Right?", [("No run finished.",)])]
    return [
        Answer("Right?", _right(comparison)),
        Answer("Faster?", _faster(comparison)),
        Answer("Smaller?", _smaller(comparison)),
    ]


def _right(comparison: Comparison) -> list[Sentence]:
    """Returns sentences on wrong runs first, then on doubtful, right and unfinished runs."""
    of_word: dict[Word, list[tuple[Entry, Verdict]]] = {}
    for entry in comparison.finished:
        if verdict := entry.verdict:
            of_word.setdefault(verdict.word, []).append((entry, verdict))
    labels = {entry.run.name: entry.label for entry in comparison.entries}
    judged = {word: [entry for entry, _ in pairs] for word, pairs in of_word.items()}

    said: list[Sentence] = []
    for entry, verdict in of_word.get(Word.DIFFERS, [])[:MOST]:
        reason = f" ({verdict.cause}): {first_clause(verdict.because)}"
        other = labels.get(verdict.reference or "", "the others")
        does = [" is wrong"] if other == entry.label else [" does not compute the same as ", Name(other)]
        said.append((Name(entry.label), *does, reason))
    said += about(judged.get(Word.DIFFERS, [])[MOST:], " does not, either.", " do not, either.")
    for entry, verdict in of_word.get(Word.REFERENCE, []):
        if verdict.because:
            said.append((Name(entry.label), f" is a reference in doubt: {first_clause(verdict.because)}"))
    for entry, verdict in of_word.get(Word.NOT_COMPARABLE, [])[:MOST]:
        said.append((Name(entry.label), f" cannot be compared: {first_clause(verdict.because)}"))
    said += about(judged.get(Word.NOT_COMPARABLE, [])[MOST:], " cannot be compared, either.")
    for entry, verdict in of_word.get(Word.NOT_SEEN, [])[:MOST]:
        said.append((Name(entry.label), f" may be wrong: {first_clause(verdict.because)}"))
    said += about(judged.get(Word.NOT_SEEN, [])[MOST:], " may be wrong, too.")
    said += about(judged.get(Word.WITHIN_NOISE, []), ": losses are within the noise, and gradients are not known.")
    said += about(judged.get(Word.NOT_EXAMINED, []), " was not examined.", " were not examined.")
    for word, one, several in (
        (Word.DIFFERS_AS_DECLARED, " differs from ", " differ from "),
        (Word.SAME, " computes the same as ", " compute the same as "),
    ):
        for reference, cause in dict.fromkeys((v.reference, v.cause) for _, v in of_word.get(word, [])):
            alike = [(e, v) for e, v in of_word[word] if (v.reference, v.cause) == (reference, cause)]
            counts = {len(verdict.checks) for _, verdict in alike}
            checks = f" ({'at least ' if len(counts) > 1 else ''}{min(counts)} checks)."
            alike.sort(key=lambda each: each[0].run.finished.blocks.step_ms_p50)  # not all may be named
            end = checks if word is Word.SAME else f" only as declared ({cause})."
            said += about([e for e, _ in alike], one, several, Name(labels.get(reference or "", str(reference))), end)
    said = said or about(judged.get(Word.REFERENCE, []), " is the reference, and there is nothing to compare with it.",
                         " are references, and there is nothing to compare with them.")  # fmt: skip
    gone = [entry for entry in comparison.entries if not entry.ok]
    wrong = list(dict.fromkeys(e.error for e in gone if e.run.result.wrong_input))[:MOST]
    for error in wrong:
        why = f" refused: {_beginning(error)}"
        said += about([e for e in gone if e.error == error], f" was{why}", f" were{why}")
    said += about([e for e in gone if e.run.result.status != UNREADABLE and e.error not in wrong], " did not finish.")
    return said + about([e for e in gone if e.run.result.status == UNREADABLE], " cannot be read.")


def _faster(comparison: Comparison) -> list[Sentence]:
    """Returns sentences on the fastest runs first, and then on runs whose intervals do not tell if they are faster. A
    ratio without an interval is no number on which anyone could rely."""
    others = [entry for entry in comparison.finished if not entry.is_baseline]
    if not others:
        entry = comparison.finished[0]
        return [(Name(entry.label), f" takes {short(entry.run.finished.blocks.step_ms_p50)} ms a step.")]
    known = sorted((e for e in others if not math.isnan(e.time_ratio.low)), key=lambda e: e.time_ratio.median)
    said: list[Sentence] = []
    if len(known) == len(others) and all(entry.time_ratio.low > 1 for entry in known):
        said += about(_only_baseline(comparison), " is the fastest.")
    told = [entry for entry in known if not entry.time_ratio.low <= 1 <= entry.time_ratio.high]
    for entry in told[:MOST]:
        ratio, of = entry.time_ratio, Name(comparison.label(entry.baseline))
        span = f" ({as_ratio(ratio.low)} to {as_ratio(ratio.high)}){_beware(entry)}."
        said.append((Name(entry.label), f" takes {as_ratio(ratio.median)} times as long as ", of, span))
    said += about(told[MOST:], ": the table has its time.", ": the table has their times.")
    for baseline in dict.fromkeys(comparison.label(entry.baseline) for entry in known):
        alike = [entry for entry in known if entry not in told and comparison.label(entry.baseline) == baseline]
        if alike:
            low, high = min(e.time_ratio.low for e in alike), max(e.time_ratio.high for e in alike)
            span = f"{as_ratio(low)} to {as_ratio(high)} times as long as "
            which = "which one is faster" if len(alike) == 1 else "whether they are faster"
            said += about(alike, f" takes {span}", f" take {span}", Name(baseline), f": {which} cannot be told.")
    apart = [entry for entry in known if not entry.side_by_side]
    said += about(apart, " took no turns with the baseline: drift of the machine counts.")
    if unknown := [entry for entry in others if entry not in known]:
        timed = [run.finished for entry in unknown for run in (entry.run, entry.baseline) if run]
        rounds = min(each.blocks.timing.rounds for each in timed)
        blocks = f"{rounds} round{' was' if rounds == 1 else 's were'} timed, and {MIN_VALUES} are needed"
        said += about(unknown, f" may be faster or slower: {blocks} (measure.budget_s).")
        labels = {comparison.label(run) for entry in unknown for run in (entry.run, entry.baseline) if run}
        if labels & remarks.disturbed(comparison.finished).keys():
            said.append(("Other programs kept cores busy meanwhile.",))
    return said


def _smaller(comparison: Comparison) -> list[Sentence]:
    """Returns sentences on the smallest first."""
    others = [entry for entry in comparison.finished if not entry.is_baseline and not math.isnan(entry.memory_ratio)]
    others.sort(key=lambda entry: entry.memory_ratio)
    if not others:
        entry = comparison.finished[0]
        return [(Name(entry.label), f" needs {_megabytes(entry.run)} at the peak of a step.")]
    said: list[Sentence] = []
    if others[0].memory_ratio > 1:
        said += about(_only_baseline(comparison), " needs the least.")
    for entry in others[:MOST]:
        assert entry.baseline is not None
        needs, base = _megabytes(entry.run), _megabytes(entry.baseline)
        share = "as much as " if needs == base else f"{as_ratio(entry.memory_ratio)} times the {base} of "
        of, beware = Name(comparison.label(entry.baseline)), _beware(entry)
        said.append((Name(entry.label), f" needs {needs}, {share}", of, f"{beware}."))
    kinds = {entry.run.name: (comparison.label(entry.baseline), _beware(entry)) for entry in others[MOST:]}
    for baseline, beware in dict.fromkeys(kinds.values()):
        alike = [entry for entry in others[MOST:] if kinds[entry.run.name] == (baseline, beware)]
        low, high = as_ratio(alike[0].memory_ratio), as_ratio(alike[-1].memory_ratio)
        span = f"{low if low == high else f'{low} to {high}'} times the memory of "
        beware = beware if len(alike) == 1 else beware.replace("does", "do").replace("differs", "differ")
        said += about(alike, f" needs {span}", f" need {span}", Name(baseline), f"{beware}.")
    return said


def _beware(entry: Entry) -> str:
    return BEWARE.get(entry.verdict.word, "") if entry.verdict else ""


def _only_baseline(comparison: Comparison) -> list[Entry]:
    """Returns the baseline; nothing where there are several, which nobody has compared with each other."""
    baselines = [entry for entry in comparison.finished if entry.is_baseline]
    return baselines if len(baselines) == 1 else []


def _megabytes(run: Run) -> str:
    return f"{short(run.finished.memory.peak_memory_bytes / MB)} MB"
