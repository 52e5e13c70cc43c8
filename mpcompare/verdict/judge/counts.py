"""Does the optimizer count all updates?

- *Value.* The number of updates that the optimizer counts after training.
- *Limit.* Exactly the number of updates that were taken.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mpcompare.verdict.judge.check import Case, Check, Checks


@dataclass(frozen=True)
class Count:
    """The number of updates that an optimizer counts after a step, and the right one."""

    count: float
    should_count: int
    dtype: str  # the format in which the backend keeps it


def checks(case: Case) -> Checks:
    """Yields the checks of the trained backend's next step. They come before the checks of updates, because a wrong
    count makes updates wrong."""
    trained = case.run.findings.trained
    if trained is not None:
        yield from of_step(trained.counts, " after training")


def of_step(counts: Mapping[str, Count], when: str = "") -> Checks:
    """A count that stops gives every later bias correction the value of an earlier step. ``when`` is in the names."""
    for name, e in counts.items():
        because = f"the optimizer counts {e.count:g} updates of {name} after update {e.should_count}"
        because += f", in {e.dtype}: its bias correction does not go on" if e.count < e.should_count else ""
        off = abs(e.count - e.should_count)
        yield Check(f"count of updates{when}", off, 0, "bias correction", because, tensor=name)
