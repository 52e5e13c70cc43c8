"""One update in the middle of training, replayed: a schedule is at work there.

The first updates belong to its warm-up, and after training a cosine has come to a rate of 0, at which an update says
nothing. So a step between the end of the warm-up and the end of training is taken as any other step, and some elements
of what its update is made of are kept.
"""

from mpcompare.contract import Batches, Stepper, Walk
from mpcompare.tasks.schedules import Schedule
from mpcompare.verdict.examine.seen import ELEMENTS
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.examine.trained import KeptStep, can_be_followed, replayed
from mpcompare.verdict.judge.drive import Drive


class Midway(Stepper):
    """A stepper that keeps an update: the first update from the middle of training on that is not skipped. It copies
    some elements. The step is the same, bit for bit.

    Attributes:
        kept: the step of this update; None before it was taken, and for a task without a schedule.
    """

    def __init__(self, stepper: Stepper, schedule: Schedule, begun: int, last_step: int) -> None:
        """``begun`` is the number of steps that were taken before training begins here. ``last_step`` is the number of
        its last step."""
        super().__init__(stepper.backend, stepper.rates)
        self.taken, self.number = begun, middle(schedule, begun, last_step)
        self.kept: KeptStep | None = None

    def walk(self, batches: Batches) -> Walk:
        self.taken += 1
        if self.number is None or self.taken < self.number or (self.kept and self.kept.after):
            return super().walk(batches)
        backend, rates = self.backend, self.rates
        count, updates = (lambda: rates.count(backend.skipped)), int(rates.updates)
        self.kept = KeptStep(backend, batches, rates.now, updates, self.taken - 1, ELEMENTS, count)
        return self.kept


def middle(schedule: Schedule, begun: int, last_step: int) -> int | None:
    """Returns the number of the step in the middle between the first step at the largest learning rate, where a warm-up
    ends, and the last step; None where the rate never changes."""
    if not schedule.length:
        return None
    peak = max(range(begun, last_step), key=schedule.factor, default=begun)
    return (peak + last_step) // 2 + 1


def midway(subject: Subject, stepper: Stepper) -> Drive | None:
    """Returns the update that the stepper of training has kept, compared with the optimizer's; None where it kept none,
    or none can be followed."""
    step = stepper.kept if isinstance(stepper, Midway) else None
    if step is None:
        return None
    rule = subject.rule_of(stepper.backend)
    # A gradient of 0 may stand for a parameter that has no gradient, and that stays as it is.
    seen = step.seen({name for name, g in step.clipped.items() if not bool(g.any())})
    return replayed(rule, step, seen, {})[0] if can_be_followed(rule, step, seen) else None
