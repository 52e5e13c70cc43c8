"""The first verdicts of a race: its runs have been examined, and are not timed yet.

The judge is the same, and so is the reference. Only the timed steps are missing, so that a verdict may still become
``differs: timed steps``; and the report judges by another run if the reference does not finish.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mpcompare.report.comparison import Comparison, compare
from mpcompare.report.runs import UNREADABLE, Run, read_any
from mpcompare.report.verdicts import judge_all
from mpcompare.verdict.judge.kinds import KINDS
from mpcompare.verdict.judge.verdict import Verdict
from mpcompare.verdict.judge.word import Word


def first_verdicts(
    folders: Mapping[str, Path],
    trained: Sequence[str],
    waiting: Collection[str],
    baseline: str = "amp",
    allow: Sequence[str] = (),
) -> dict[str, str]:
    """Returns a line for each verdict that stands, by the name of its run. Raises InputError where the runs are not
    comparable.

    Args:
        folders: those of all runs of the race, by name.
        trained: the runs that have been examined.
        waiting: the runs whose turn is still to come.
        baseline: the backend that others are compared with.
        allow: fields in which runs may differ.
    """
    runs = {name: read_any(folder, name) for name, folder in folders.items()}
    precisions = {runs[name].result.backend: runs[name].result.precision for name in trained}
    known = [_as_finished(run, name in trained, precisions) for name, run in runs.items()]
    lines = {}
    for comparison in compare(known, baseline, allow):
        for name, verdict in judge_all(comparison).items():
            reference = runs[verdict.reference or name]
            if verdict.word is not Word.NOT_EXAMINED and (not waiting or reference.result.backend == baseline):
                lines[name] = _line(comparison, name, verdict)
    return lines


def _as_finished(run: Run, trained: bool, precisions: Mapping[str, str]) -> Run:
    """Returns a run of the race as it will be if it finishes. One that waits has the precision that ``auto`` is for
    another run of its backend, so that its label is the one that it will have."""
    result = run.result
    if trained:
        return run if result.status == UNREADABLE else replace(run, result=replace(result, status="ok"))
    known = precisions if result.precision == "auto" else {}
    return replace(run, result=replace(result, precision=known.get(result.backend, result.precision)))


def _line(comparison: Comparison, name: str, verdict: Verdict) -> str:
    """Returns ``scratch bf16: same so far (compared with amp bf16)``."""
    labels = {entry.run.name: entry.label for entry in comparison.entries}
    word = verdict.word if settled(verdict) else f"{verdict.word} so far"
    said = f"{word}: {verdict.cause}" if verdict.cause else word
    compared = f" (compared with {labels[verdict.reference]})" if verdict.reference not in (None, name) else ""
    return f"{labels[name]}: {said}{compared}"


def settled(verdict: Verdict) -> bool:
    """Returns whether the timed steps cannot change a verdict: a check that comes before them failed."""
    before = list(KINDS)[: list(KINDS).index("timed steps")]
    return verdict.word is Word.DIFFERS and any(not check.passed and check.kind in before for check in verdict.checks)
