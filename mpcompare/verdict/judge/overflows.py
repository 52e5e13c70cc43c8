"""Overflows: gradients overflow where the reference's do."""

import math
from collections.abc import Iterator

from mpcompare.verdict.judge import promises
from mpcompare.verdict.judge.check import Case, Check
from mpcompare.verdict.judge.trajectories import common_steps, draws_alike


def checks(case: Case) -> Iterator[Check]:
    """Yields checks of the skipped training steps, and of the passes ``first``, ``overflow`` and ``infinite
    input``.

    Whether a gradient near the end of fp16's range overflows is decided by its last digit, and from then on two correct
    runs differ: one step more or less of the first pass, and in training 4 standard deviations of such a count
    (Poisson) in the steps before the reference and its noise runs part. From a scale that is far too large exactly.
    """
    if case.is_reference or promises.own_loss_scale(case.run.findings):
        return
    run, reference = case.run, case.reference
    alike = run.start == reference.start and draws_alike(run, reference)
    steps = common_steps(reference) if alike else 0
    skipped, expected = (int(each.steps["skipped"].iloc[:steps].sum()) for each in (run, reference))
    because = f"{skipped} of the first {steps} training steps skipped, of {reference.name} {expected}"
    limit = 4 * math.sqrt(max(expected, 1))
    yield Check("skipped training steps", abs(skipped - expected), limit, "overflow", because)
    if not run.findings.first.gradients:  # nothing shows whether they were finite
        return
    for where, free in (("first", 1), ("overflow", 0), ("infinite input", 0)):
        drives = [each.findings.drives.get(where) for each in (run, reference)]
        a, b = ([step.finite for step in drive.steps] if drive else [] for drive in drives)
        if not (a and b):  # without loss scaling there is no pass overflow, and with it no pass infinite input
            continue
        because = f"{a.count(False)} steps of pass {where} overflow, of {reference.name} {b.count(False)}"
        value = abs(a.count(False) - b.count(False)) if free else float(a != b)
        yield Check(f"overflows of pass {where}", value, free, "overflow", because)
