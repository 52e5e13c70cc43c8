"""The losses in timed blocks are those of the trained backend that was examined, at the same steps."""

import math
from collections.abc import Iterator

from mpcompare.verdict.judge.check import Case, Check
from mpcompare.verdict.judge.limits import reordered_loss


def checks(case: Case) -> Iterator[Check]:
    """Yields one check where anything was timed, and the loss is finite; none of a backend that rounds at
    random."""
    difference, loss = case.run.timed_loss_difference, case.run.timed_loss
    at_random = case.run.findings.promises.rounding == "stochastic"
    if difference is None or loss is None or not math.isfinite(loss) or at_random:
        return
    because = f"the loss of a timed step is {difference:.1e} away from what the examined backend gives there"
    yield Check("loss of timed steps", difference, reordered_loss(case.run, loss), "timed steps", because)
