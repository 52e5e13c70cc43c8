"""Is an update in the middle of a schedule right?

- *Why.* After training a cosine has come to a rate of 0, at which any update is right.
- *Value.* If a schedule changes the rate: an update halfway between the end of the warm-up and the end of training.
- *Limit.* The limit of one update.
"""

from mpcompare.verdict.judge import optimizer
from mpcompare.verdict.judge.check import Case, Checks


def checks(case: Case) -> Checks:
    """Yields the checks of that update, with the roundings of one update."""
    drive = case.run.findings.midway
    if drive is not None:
        yield from optimizer.of_passes(case.run, {"midway": drive})
