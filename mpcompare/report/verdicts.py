"""The verdict on each run of a comparison; and the first verdicts of a race, whose runs are examined and not timed yet.

The judge of the first verdicts is the same, and so is the reference. Only the timed steps are missing, so that a
verdict may still become ``differs: timed steps``; and the report judges by another run if the reference does not
finish.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mpcompare.report.comparable import differing
from mpcompare.report.comparison import Comparison, closest, compare
from mpcompare.report.runs import UNREADABLE, Run, read_any
from mpcompare.verdict.judge.check import Examined, Timed
from mpcompare.verdict.judge.kinds import KINDS
from mpcompare.verdict.judge.verdict import Verdict, judge
from mpcompare.verdict.judge.word import Word

COLOURS = {"same": "#00664b", "differs": "#a83a00", "near": "#7a5200", "other": "0.3"}  # by ``Word.kind``


def judge_all(comparison: Comparison) -> dict[str, Verdict]:
    """Returns the verdict on every finished run of a comparison, by the name of its folder.

    The reference of a run is the baseline in the same precision. Without such a baseline it is the closest run in the
    precision, which may be the run itself: torch's backend with the precision's name, ``fp32`` or ``tf32``, if there is
    one.
    """
    verdicts = {}
    for entry in comparison.finished:
        run, reference, precision = entry.run, entry.baseline, entry.run.result.precision
        if reference is None or reference.result.precision != precision:
            reference = closest(run, (other.run for other in comparison.finished), precision)
        try:
            verdicts[run.name] = judge_run(run, reference)
        except Exception as error:  # other runs have their verdicts all the same
            because = f"the judge stopped with {type(error).__name__}: {error}"
            verdicts[run.name] = Verdict(Word.NOT_EXAMINED, "the judge", because, reference.name)
    return verdicts


def judge_run(run: Run, reference: Run) -> Verdict:
    """Returns the verdict on ``run``; both may be the same one."""
    examined = examined_of(run)
    beside = examined if run is reference else examined_of(reference)
    if examined is None or beside is None:
        return Verdict(Word.NOT_EXAMINED, *_why_not(run, reference), reference.name)
    if fields := differing(run, reference):
        return Verdict(Word.NOT_COMPARABLE, fields[0], f"{fields[0]} is different in {reference.name}", reference.name)
    return replace(judge(examined, beside), reference=reference.name)


def _why_not(run: Run, reference: Run) -> tuple[str, str]:
    """Returns why a run, or else its reference, was not examined: a cause and a sentence, empty where nobody asked."""
    if run.result.set_up and run.result.set_up.not_finite:
        return "data", run.result.set_up.not_finite
    for which, each in {"": run, " of the reference": reference}.items():
        if (taken := each.result.examined) and taken.examine_refused:
            return "memory", f"the examination{which} did not begin: {taken.examine_refused}"
        if taken and taken.examine_stopped:
            return "examination", f"the examination{which} stopped: {taken.examine_stopped}"
    return "", ""


def examined_of(run: Run) -> Examined | None:
    """Returns what the judge needs of a run; None where it was not examined."""
    result = run.result
    if run.findings is None or result.training is None:
        return None
    return Examined(
        name=f"{result.backend} {result.precision}",
        precision=result.precision,
        dtypes=result.training.dtypes,
        findings=run.findings,
        steps=run.steps,
        layers=result.module_dtypes or {},
        start=run.start,
        timed=Timed(result.compared, run.blocks) if result.compared else None,
    )


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
        folders: the folders of all runs of the race, by name.
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
    """Returns a run of the race as it will be if it finishes. A waiting run gets the precision that ``auto`` is for
    another run of its backend, so that it has its later label already."""
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
