"""An update in the middle of training, beside the optimizer's from the state that the backend had."""

from collections.abc import Iterator

from mpcompare.verdict.judge import optimizer
from mpcompare.verdict.judge.check import Case, Check


def checks(case: Case) -> Iterator[Check]:
    """Yields the checks of that update, with the roundings of one update."""
    drive = case.run.findings.midway
    if drive is not None:
        yield from optimizer.of_passes(case.run, {"midway": drive})
