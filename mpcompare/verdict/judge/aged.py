"""Is a step right from a state as it is after long training?

- *Value.* One step at the initial weights, from a state as it is after long training. The loss scale needs one more
  good step to grow, and the optimizer counts 2048 updates: after 2048 no 16-bit format holds one more.
- *Limit.* Gradients as `later steps`. Loss scale and count exactly. The update has the limit of one update, from
  moments that are known. So an AdamW that decays after the update is found, though this changes only 1e-5 of the
  update.
"""

from dataclasses import dataclass, field

from mpcompare.verdict.judge import clip, loss_scale, optimizer
from mpcompare.verdict.judge.check import Case, Checks
from mpcompare.verdict.judge.counts import Count, of_step
from mpcompare.verdict.judge.drive import Drive
from mpcompare.verdict.judge.gradients import of_drives

AGED = "aged"


@dataclass(frozen=True)
class Aged:
    """A step from a state as it is after long training."""

    drive: Drive  # the step, at the initial weights
    grows: bool  # whether the loss scale grows after it
    counts: dict[str, Count] = field(default_factory=dict)  # by tensor, where the optimizer counts


def checks(case: Case) -> Checks:
    """Yields the checks of the first pass, once more, and the count of updates, exactly."""
    aged, reference = case.run.findings.aged, case.reference.findings.aged
    if aged is None:
        return
    yield from loss_scale.of_pass(AGED, aged.drive)
    if reference:
        where = "in the step after which the loss scale grows" if aged.grows else "from an aged state"
        yield from of_drives(case, where, aged.drive, reference.drive, {}, "")
    yield from of_step(aged.counts)
    yield from clip.of_pass(case.run, AGED, aged.drive)
    yield from optimizer.of_passes(case.run, {AGED: aged.drive})
