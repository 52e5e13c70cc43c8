"""The verdict on each run of a comparison."""

from collections.abc import Sequence
from dataclasses import replace

from mpcompare.report.comparable import differing
from mpcompare.report.comparison import Comparison, Entry
from mpcompare.report.runs import Run
from mpcompare.verdict.judge.check import Examined, Timed
from mpcompare.verdict.judge.verdict import Verdict, judge
from mpcompare.verdict.judge.word import Word

COLOURS = {"same": "#00664b", "differs": "#a83a00", "near": "#7a5200", "other": "0.3"}  # by ``Word.kind``


def judge_all(comparison: Comparison) -> dict[str, Verdict]:
    """Returns the verdict on every finished run of a comparison, by the name of its folder.

    The reference of a run is the baseline in the same precision. Where there is none, it is the backend of torch that
    has the precision's name, ``fp32`` or ``tf32``, and else the first run in that precision.
    """
    finished = [entry for entry in comparison.entries if entry.ok]
    return {entry.run.name: _judged(entry.run, _reference(entry, finished)) for entry in finished}


def _judged(run: Run, reference: Run) -> Verdict:
    """Returns the verdict on ``run``. Where the judge stops with an error, it is that: other runs have their own."""
    try:
        return judge_run(run, reference)
    except Exception as error:
        because = f"the judge stopped with {type(error).__name__}: {error}"
        return Verdict(Word.NOT_EXAMINED, "the judge", because, reference.name)


def _reference(entry: Entry, finished: Sequence[Entry]) -> Run:
    precision = entry.run.result.precision
    if entry.baseline and entry.baseline.result.precision == precision:
        return entry.baseline
    alike = [other.run for other in finished if other.run.result.precision == precision]
    return next((run for run in alike if run.result.backend == precision), alike[0])


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
    """Returns what kept a run, or else its reference, from being examined, and a sentence on it; both are empty where
    nobody asked for it."""
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
        layers=result.observed.module_dtypes if result.observed else {},
        start=run.start,
        timed=Timed(result.compared, run.blocks) if result.compared else None,
    )
