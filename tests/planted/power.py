"""The verdict's power: which planted bug is seen by which check, and are correct runs ever accused?

    python tests/planted/power.py planted --family all       tables of planted bugs by kinds of checks
    python tests/planted/power.py correct --tasks 100        random tasks, seeds and precisions with scratch and fused
    python tests/planted/power.py correct --family gpt       with the implementations of tests/support/correct.py
    python tests/planted/power.py correct --family unstable  MLPs whose learning rate is too large
    python tests/planted/power.py correct --family recipe    random optimizers, schedules, clips and accumulations
    python tests/planted/power.py correct --family cnn --compiled  with amp_compile, one shape a family

Exit code 1 where a bug is missed that should be seen, or a correct run is accused.
"""

import argparse
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import planted.cnn
import planted.gpt
import planted.lstm
from planted.mlp import MUTANTS
from planted.recipe import RECIPE, planted_run
from planted.registry import PLANTED, STEPS, TASKS
from support.backends import BACKENDS
from support.correct import CASES as FIXED_RECIPE
from support.correct import FAMILIES, Case
from support.correct_recipe import recipe_case
from support.judging import examined
from verdict.test_verdict import reference

from mpcompare.records import Run
from mpcompare.verdict.judge.checks import KINDS
from mpcompare.verdict.judge.verdict import Verdict, judge_run

references: dict[str, Run] = {}
CASES = {**FIXED_RECIPE, "recipe": recipe_case}


class Bug(NamedTuple):
    """A planted bug and what was said of it."""

    name: str
    precision: str
    cause: str
    invisible: str
    verdict: Verdict


def judged_bugs(family: str, names: Sequence[str] = ()) -> Iterator[Bug]:
    """Those of ``names``, or all, of a family."""
    if family == "recipe":
        for name, recipe in RECIPE.items():
            for precision in recipe.precisions if not names or name in names else ():
                verdict = judge_run(*planted_run(name, recipe, precision))
                yield Bug(name, precision, recipe.cause, recipe.invisible, verdict)
        return
    if family == "mlp":
        for name, mutant in MUTANTS.items():
            for precision in mutant.precisions if not names or name in names else ():
                task, dataset, amp = reference(precision, **(mutant.task or {}))
                verdict = judge_run(examined(name, mutant.backend, task, dataset, precision), amp)
                yield Bug(name, precision, mutant.cause, mutant.invisible, verdict)
        return
    for name, bug in PLANTED[family].items():
        if names and name not in names:
            continue
        task, dataset = TASKS[bug.task]()
        if bug.task not in references:
            references[bug.task] = examined("amp", BACKENDS["amp"], task, dataset, "bf16", steps=STEPS, noise=2)
        verdict = judge_run(examined(name, bug.backend, task, dataset, "bf16", steps=STEPS), references[bug.task])
        yield Bug(name, "bf16", bug.cause, bug.invisible, verdict)


def planted(family: str) -> bool:
    """A row a bug and precision: how many checks of each kind fail, the first one's cause in the last column."""
    print(f"| planted bug ({family}) | precision | {' | '.join(KINDS)} | verdict |")
    print(f"|{' --- |' * (len(KINDS) + 3)}")
    rows = []
    for bug in judged_bugs(family):
        rows.append(bug)
        failed = Counter(check.kind for check in bug.verdict.checks if not check.passed)
        counts = " | ".join(str(failed[kind] or "") for kind in KINDS)
        print(f"| {bug.name} | {bug.precision} | {counts} | {bug.verdict} |", flush=True)
        if bug.verdict.cause != bug.cause and not bug.invisible:
            print(f"not as planted ({bug.cause}): {bug.verdict.because}", file=sys.stderr)
    visible = [bug for bug in rows if not bug.invisible]
    flagged = sum(bug.verdict.word == "differs" for bug in visible)
    named = sum(bug.verdict.cause == bug.cause for bug in visible)
    bugs = len({bug.name for bug in rows})
    print(f"{family}: {bugs} bugs, {len(rows)} rows: {flagged} flagged, {named} with their cause, ", end="")
    print(f"{len(visible) - flagged} missed, {len(rows) - len(visible)} invisible:")
    for bug in rows:
        if bug.invisible:
            print(f"{bug.name}: {bug.invisible}")
    return flagged == len(visible)


def judged_case(case: Case) -> Iterator[tuple[str, Verdict]]:
    """The verdict on ``amp`` itself, and on each correct implementation beside it."""

    def run(name: str, backend: type, noise: int = 0) -> Run:
        return examined(
            name, backend, case.task, case.dataset, case.precision, case.seed, steps=case.steps, noise=noise
        )

    amp = run("amp", BACKENDS["amp"], noise=2)
    yield "amp", judge_run(amp, amp)
    for name, backend in case.backends.items():
        yield name, judge_run(run(name, backend), amp)


def correct(family: str, first: int, tasks: int, precisions: Sequence[str], compiled: bool) -> bool:
    """Every check of correct runs: how near the worst one came to its limit."""
    worst: dict[str, tuple[float, str]] = defaultdict(lambda: (0.0, ""))
    runs: Counter[str] = Counter()
    accused = parted = 0
    for seed in range(first, first + tasks):
        for precision in precisions:
            case = CASES[family](seed, precision)
            if compiled:  # each shape takes half a minute to compile: one for all seeds
                shape = CASES[family](first, precision)
                case = replace(shape, seed=seed, backends={"amp_compile": BACKENDS["amp_compile"]})
            for name, verdict in judged_case(case):
                where = f"seed {seed}, {precision}, {name}"
                if name != "amp":
                    runs[name] += 1
                    parted += any(what.startswith("training from") for what in verdict.unchecked)
                if verdict.word not in ("same", "reference"):
                    accused += 1
                    where += f", {case.task}" if family == "recipe" else ""
                    print(f"{where}: {verdict}: {verdict.because}", flush=True)
                for check in verdict.checks:
                    if check.limit and check.value / check.limit > worst[check.kind][0]:
                        worst[check.kind] = check.value / check.limit, f"{check.name}; {where}"
    for kind in KINDS:
        if kind in worst:
            print(f"{worst[kind][0]:.3f} of the limit: {kind} ({worst[kind][1]})")
    print(f"{family}: {runs.total()} correct runs ({', '.join(f'{n} {name}' for name, n in runs.items())}), ", end="")
    print(f"{accused} accused; {parted} parted from the reference's before their end")
    return accused == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("planted", "correct"))
    parser.add_argument("--family", choices=(*FAMILIES, "unstable", "recipe", "all"), default="mlp")
    parser.add_argument("--tasks", type=int, default=25)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--precision", choices=("fp16", "bf16"), action="append")
    parser.add_argument("--compiled", action="store_true")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "GradScaler|lr_scheduler|.*lr_scheduler.step")
    start = time.monotonic()
    good = True
    for family in FAMILIES if args.family == "all" else (args.family,):
        both = ("bf16",) if family in ("cnn", "lstm") else ("fp16", "bf16")  # torch's CPU has them, or they are slow
        precisions = args.precision or both
        good &= (
            planted(family)
            if args.what == "planted"
            else correct(family, args.first, args.tasks, precisions, args.compiled)
        )
    print(f"{time.monotonic() - start:.0f} s")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
