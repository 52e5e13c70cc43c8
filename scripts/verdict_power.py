"""The verdict's power: which planted bug is seen by which check, and are correct runs ever accused?

    python scripts/verdict_power.py planted              a table of tests/mutants.py by kinds of checks
    python scripts/verdict_power.py correct --tasks 100  random tasks, seeds and precisions with scratch and fused

Exit code 1 where a bug is missed that should be seen, or a correct run is accused.
"""

import argparse
import sys
import time
import warnings
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from judging import examined
from mutants import MUTANTS
from test_verdict import BACKENDS, DIGITS, random_task, reference

from mpcompare.report.judge.checks import KINDS
from mpcompare.report.judge.verdict import judge_run
from mpcompare.tasks import data, mlp


def planted() -> bool:
    """A row a bug and precision: how many checks of each kind fail, the first one's cause in the last column."""
    print(f"| planted bug | precision | {' | '.join(KINDS)} | verdict |")
    print(f"|{' --- |' * (len(KINDS) + 3)}")
    named, missed, listed = 0, 0, 0
    for name, mutant in MUTANTS.items():
        for precision in mutant.precisions:
            task = mlp.Task(**{**DIGITS, **(mutant.task or {})})
            dataset, amp = reference(task, precision)
            verdict = judge_run(examined(name, mutant.backend, task, dataset, precision), amp)
            failed = Counter(check.kind for check in verdict.checks if not check.passed)
            print(
                f"| {name} | {precision} | {' | '.join(str(failed[k] or '') for k in KINDS)} | {verdict} |", flush=True
            )
            if mutant.invisible:
                listed += 1
            elif verdict.cause == mutant.cause:
                named += 1
            else:
                missed += 1
                print(f"not as planted ({mutant.cause}): {verdict.because}", file=sys.stderr)
    rows = sum(len(mutant.precisions) for mutant in MUTANTS.values())
    print(f"{len(MUTANTS)} bugs, {rows} rows: {named} flagged with their cause, {missed} not, {listed} invisible:")
    for name, mutant in MUTANTS.items():
        if mutant.invisible:
            print(f"{name}: {mutant.invisible}")
    return missed == 0


def correct(tasks: int) -> bool:
    """Every check of correct runs: how near the worst one came to its limit."""
    worst: dict[str, tuple[float, str]] = defaultdict(lambda: (0.0, ""))
    runs, accused = 0, 0
    for seed in range(tasks):
        task = random_task(seed)
        dataset = data.synthetic(task, seed)
        for precision in ("fp16", "bf16"):
            amp = examined("amp", BACKENDS["amp"], task, dataset, precision, seed, noise=2)
            for name in ("scratch", "fused"):
                verdict = judge_run(examined(name, BACKENDS[name], task, dataset, precision, seed), amp)
                runs += 1
                if verdict.word != "same":
                    accused += 1
                    print(f"seed {seed}, {precision}, {name}: {verdict}: {verdict.because}", flush=True)
                for check in verdict.checks:
                    if check.limit and check.value / check.limit > worst[check.kind][0]:
                        worst[check.kind] = check.value / check.limit, f"{check.name}; seed {seed}, {precision}, {name}"
    for kind in KINDS:
        if kind in worst:
            print(f"{worst[kind][0]:.3f} of the limit: {kind} ({worst[kind][1]})")
    print(f"{runs} correct runs, {accused} accused")
    return accused == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("planted", "correct"))
    parser.add_argument("--tasks", type=int, default=25)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "GradScaler|lr_scheduler")
    start = time.monotonic()
    good = planted() if args.what == "planted" else correct(args.tasks)
    print(f"{time.monotonic() - start:.0f} s")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
