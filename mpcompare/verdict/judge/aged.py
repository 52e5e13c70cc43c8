"""A step from a state as it is after long training: the loss scale grows, and the optimizer counts many updates."""

from collections.abc import Iterator, Mapping

from mpcompare.verdict.findings import Count
from mpcompare.verdict.judge import clip, loss_scale, optimizer
from mpcompare.verdict.judge.check import Case, Check
from mpcompare.verdict.judge.gradients import from_an_aged_state

AGED = "aged"


def checks(case: Case) -> Iterator[Check]:
    """Yields the checks of the first pass, once more, and the count of updates, exactly."""
    aged = case.run.findings.aged
    if aged is None:
        return
    yield from loss_scale.of_pass(AGED, aged.drive)
    yield from from_an_aged_state(case)
    yield from counts_of(aged.counts)
    yield from clip.of_pass(case.run, AGED, aged.drive)
    yield from optimizer.of_passes(case.run, {AGED: aged.drive})


def counts_of(counts: Mapping[str, Count], when: str = "") -> Iterator[Check]:
    """A count that stops makes every later bias correction that of a younger state; ``when`` is a part of the names."""
    for name, e in counts.items():
        because = f"the optimizer counts {e.count:g} updates of {name} after update {e.should_count}"
        because += f", in {e.dtype}: its bias correction does not go on" if e.count < e.should_count else ""
        yield Check(
            f"count of updates{when}", abs(e.count - e.should_count), 0, "bias correction", because, tensor=name
        )
