"""One update in the middle of training, replayed: a schedule is at work there.

The first updates are those of its warm-up, and after training a cosine has come to a rate of 0, at which an update says
nothing. So a step between the end of the warm-up and that of training is taken as any other, and some elements of what
its update is made of are kept.
"""

from collections.abc import Iterator
from dataclasses import replace

from mpcompare.contract import Batches, Stepper, Walk, promises_of
from mpcompare.phases import WHOLE_STEP
from mpcompare.tasks.schedules import Schedule
from mpcompare.tasks.task import Params
from mpcompare.verdict.examine.numerics import spreads
from mpcompare.verdict.examine.seen import Seen, UpdateRule, all_finite
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.examine.trained import BeforeStep, remembers_all, replayed, start_of
from mpcompare.verdict.judge.drive import Drive

ELEMENTS = 1 << 12  # of each tensor


class Midway(Stepper):
    """A stepper that keeps an update in the middle of training, the first one from there on that is taken. It copies
    some elements; the step is the same, bit for bit.

    Attributes:
        kept: the backend before that update, and the update, some elements of each tensor; None before it was taken,
            and of a task without a schedule.
    """

    def __init__(self, stepper: Stepper, schedule: Schedule, begun: int, last_step: int) -> None:
        """``begun`` is the number of steps that were taken before training begins here, ``last_step`` that of its last
        one."""
        super().__init__(stepper.backend, stepper.rates)
        self.taken, self.number = begun, middle(schedule, begun, last_step)
        self.kept: tuple[BeforeStep, Seen] | None = None

    def walk(self, batches: Batches) -> Walk:
        self.taken += 1
        if self.number is None or self.kept is not None or self.taken < self.number:
            return super().walk(batches)
        return _KeptWalk(self, batches)


class _KeptWalk(Walk):
    """A step that keeps the parts of its update."""

    def __init__(self, stepper: Midway, batches: Batches) -> None:
        backend, rates = stepper.backend, stepper.rates
        lr = float(rates.now)
        self.stepper, self.start = stepper, start_of(backend, lr, int(rates.updates), stepper.taken - 1, ELEMENTS)
        self.grads: Params = {}
        self.clipped: Params = {}
        super().__init__(backend, batches, rates.now, lambda: rates.count(backend.skipped))

    def __iter__(self) -> Iterator[str]:
        for phase in super().__iter__():
            if phase == "unscale":
                self.grads = spreads(self.backend.grads(), ELEMENTS)
            if phase in ("clip", WHOLE_STEP):
                self.clipped = spreads(self.backend.grads(), ELEMENTS)
            if phase in ("step", WHOLE_STEP) and not bool(self.backend.skipped):
                after = spreads(self.backend.master_params(), ELEMENTS)
                self.stepper.kept = self.start, self.start.seen(self.grads or self.clipped, self.clipped, after)
            yield phase


def middle(schedule: Schedule, begun: int, last_step: int) -> int | None:
    """Returns the number of the step in the middle between the first one at the largest learning rate, where a warm-up
    ends, and the last one; None where the rate never changes."""
    if not schedule.length:
        return None
    peak = max(range(begun, last_step), key=schedule.factor, default=begun)
    return (peak + last_step) // 2 + 1


def midway(subject: Subject, stepper: Stepper) -> Drive | None:
    """Returns the update that was kept compared with the optimizer's; None where there is none that can be followed.

    Args:
        stepper: that of training.
    """
    kept = stepper.kept if isinstance(stepper, Midway) else None
    if kept is None:
        return None
    start, seen = kept
    rule = UpdateRule(subject.task, subject.precision, promises_of(stepper.backend))
    if not remembers_all(rule, start) or not seen.clipped or not all_finite(seen.clipped):
        return None
    # A gradient of 0 may be that of a parameter that has none, and stays as it is.
    clipped = {name: g for name, g in seen.clipped.items() if bool(g.any())}
    return replayed(rule, start, replace(seen, clipped=clipped), {})[0]
