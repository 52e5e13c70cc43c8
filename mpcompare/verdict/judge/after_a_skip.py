"""Are gradients right after a skipped step?

- *Value.* Gradients of the first good step after a skipped one, compared with a new backend's gradients at the same
  weights and scale.
- *Limit.* As `later steps`.
"""

from mpcompare.verdict.judge.check import Case, Checks
from mpcompare.verdict.judge.gradients import of_drives


def checks(case: Case) -> Checks:
    """Yields checks of the pass ``overflow``."""
    run, reference = case.run.findings.overflow, case.reference.findings.overflow
    yield from of_drives(case, "after a skipped step", run, reference, {}, "after a skip")
