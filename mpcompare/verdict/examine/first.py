"""The pass ``first``: a new backend from the initial weights, compared with the float64 oracle and fp32 arithmetic."""

from collections.abc import Sequence

from mpcompare.contract import Batches
from mpcompare.verdict.examine.drive import Driver, drive
from mpcompare.verdict.examine.idle import uses_all
from mpcompare.verdict.examine.oracle import Exact
from mpcompare.verdict.examine.subject import Subject


def first(subject: Subject, batches: Sequence[Batches], exact: Exact) -> Driver:
    """Takes the first step, and as many more as show what else an update depends on; returns who took them.

    The second step shows another learning rate, and what the optimizer remembers; the third, how well: what it
    remembers of one gradient has no more digits than that. Where the first does not depend on every parameter, more
    batches may show the others.

    Args:
        batches: the first four.
        exact: the oracle's step on the first batch.
    """
    task, optimizer = subject.task, subject.task.optimizer
    follow = batches[1:3] if optimizer.remembers else batches[1 : 1 + bool(task.schedule.length)]
    if not uses_all(subject.examined, exact.grads):
        follow = batches[1:4]
    return drive(subject, subject.scaling, batches[0], follow, exact, with_oracle=True)
