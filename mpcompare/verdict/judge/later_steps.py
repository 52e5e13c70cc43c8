"""Are the trained backend's gradients right for its weights?

- *Value.* Gradients of the trained backend, compared with a new backend's gradients at its weights and loss scale.
- *Limit.* One rounding of the largest element, and fp32 sums, because both backends round alike.
"""

from mpcompare.verdict.judge.causes import Pass
from mpcompare.verdict.judge.check import Case, Checks
from mpcompare.verdict.judge.gradients import gradient_checks


def checks(case: Case) -> Checks:
    """Yields checks of the pass ``last``."""
    step = Pass(case.run.findings.last, case.reference.findings.last)
    yield from gradient_checks(case, "after training", step, {}, "later steps")
