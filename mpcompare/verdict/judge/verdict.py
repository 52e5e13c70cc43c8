"""Does a run compute the same as its reference? From records only; docs/verdict.md says why these checks, and how good.

The reference is the baseline in the same precision, or, where there is none, the first run in that precision.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mpcompare.records import Run, write_json
from mpcompare.report.comparable import differing, start_of
from mpcompare.report.comparison import Comparison, Entry
from mpcompare.verdict.judge.checks import Check, checks, common_steps, has_gradients, not_finite

GRADIENTS = "gradients in the first step"
TRAINING = "training (no noise was measured)"
RESUMED = "training (it began at another point: resume)"


@dataclass(frozen=True)
class Verdict:
    """What is said of a run.

    Attributes:
        word: ``same``; ``within noise`` (its gradients cannot be seen, the run cannot be told from its reference's);
            ``differs``; ``reference`` (others are compared with it; it passed what needs no other); ``not comparable``;
            ``not examined`` (it or its reference: ``verdict.enabled=false``).
        cause: of ``differs``, that of the first check that failed; of ``not comparable``, the field.
        because: the cause in a sentence.
        unchecked: what could not be looked at.
    """

    word: str
    cause: str = ""
    because: str = ""
    reference: str | None = None
    checks: list[Check] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.word}: {self.cause}" if self.cause else self.word


def judge(comparison: Comparison) -> dict[str, Verdict]:
    """The verdict on every finished run of a comparison, by the name of its folder."""
    finished = [entry for entry in comparison.entries if entry.ok]
    return {entry.run.name: judge_run(entry.run, _reference(entry, finished)) for entry in finished}


def write(verdicts: Mapping[str, Verdict], path: Path) -> None:
    """Writes ``verdict.json``: by run, what is said of it, and every check with its value and limit."""
    found = {
        name: {**asdict(verdict), "checks": [{**asdict(c), "passed": c.passed} for c in verdict.checks]}
        for name, verdict in verdicts.items()
    }
    write_json(path, found, indent=2)


def _reference(entry: Entry, finished: Sequence[Entry]) -> Run:
    """The baseline, where it has the same precision; else the first run that has."""
    precision = entry.run.result["precision"]
    if entry.baseline and entry.baseline.result["precision"] == precision:
        return entry.baseline
    return next(other.run for other in finished if other.run.result["precision"] == precision)


def judge_run(run: Run, reference: Run) -> Verdict:
    """The verdict on ``run``; both may be the same one."""
    if run.numerics is None or reference.numerics is None:
        return Verdict("not examined", reference=reference.name)
    if fields := differing(run, reference):
        return Verdict("not comparable", fields[0], f"{fields[0]} is not that of {reference.name}", reference.name)
    done = list(checks(run, reference))
    unchecked = [] if run is reference else _unchecked(run, reference)
    failed = next((check for check in done if not check.passed), None)
    if failed:
        return Verdict("differs", failed.cause, failed.because, reference.name, done, unchecked)
    if run is reference:
        return Verdict("reference", reference=reference.name, checks=done)
    if GRADIENTS in unchecked:
        if TRAINING in unchecked:
            return Verdict("not comparable", "gradients", "neither gradients nor noise are known", reference.name, done)
        if RESUMED in unchecked:
            because = "its gradients are not known, and training began at another point"
            return Verdict("not comparable", "resume", because, reference.name, done)
        return Verdict("within noise", "", "", reference.name, done, unchecked)
    return Verdict("same", "", "", reference.name, done, unchecked)


def _unchecked(run: Run, reference: Run) -> list[str]:
    mine, theirs = run.numerics or {}, reference.numerics or {}
    passes = {"first": GRADIENTS, "overflow": "gradients after a skipped step", "last": "gradients after training"}
    missing = [
        what
        for where, what in passes.items()
        if not has_gradients(where, mine, theirs) and (where in mine or where in theirs)
    ]
    if not mine.get("linear", True):
        missing.append("first change of the weights (the optimizer is not linear in the gradients)")
    if has_gradients("last", mine) and (overflowed := not_finite(mine["last"])):
        missing.append(f"gradients after training that overflow ({', '.join(overflowed)})")
    if replaced := sorted(set(theirs.get("twin", {}).values())):  # "GELU for ReLU"
        smooth, kinked = ([words.split(" for ")[place] for words in replaced] for place in (0, 1))
        missing.append(f"{_and(kinked)} (examined as {_and(dict.fromkeys(smooth))})")
    if start_of(run) != start_of(reference):
        return [*missing, RESUMED]
    if not theirs["noise"]:
        return [*missing, TRAINING]
    steps = common_steps(reference, run)
    if steps < len(reference.steps):
        missing.append(f"training from step {reference.steps['step'][steps]} on, where correct runs part")
    return missing


def _and(words: Iterable[str]) -> str:
    *some, last = words
    return f"{', '.join(some)} and {last}" if some else last
