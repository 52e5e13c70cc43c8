"""The kinds of checks: each a number, a limit that is derived, and the cause where it does not hold.

Limits come from the rounding of the precision, from the errors that the reference makes itself, or from the noise that
it measured; none was chosen so that something passes. To add a kind, write its file and its line here.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from mpcompare.verdict.judge import (
    again,
    aged,
    buffers,
    clip,
    counts,
    dtypes,
    gradients,
    held_out,
    idle,
    layers,
    lent,
    loss_scale,
    masks,
    midway,
    moves,
    optimizer,
    overflow,
    padding,
    promises,
    resume,
    run,
    timed_steps,
    trained,
    trained_buffers,
)
from mpcompare.verdict.judge.check import Case, Check

# In the order of their power to explain: the first that fails is the cause of what fails after it. Of the reference
# itself, each yields what needs no other run.
KINDS: dict[str, Callable[[Case], Iterator[Check]]] = {
    "lent": lent.checks,
    "promises": promises.checks,
    "dtypes": dtypes.checks,
    "loss scale": loss_scale.checks,
    "again": again.checks,
    "gradients": gradients.in_the_first_step,
    "layers": layers.in_the_first_step,
    "masks": masks.checks,
    "buffers": buffers.checks,
    "clip": clip.checks,
    "idle": idle.checks,
    "counts": counts.checks,
    "optimizer": optimizer.checks,
    "later steps": gradients.later_steps,
    "trained layers": layers.after_training,
    "overflow": overflow.checks,
    "after a skip": gradients.after_a_skip,
    "sharp": layers.at_sharp_weights,
    "padding": padding.checks,
    "resume": resume.checks,
    "aged": aged.checks,
    "trained": trained.checks,
    "midway": midway.checks,
    "trained buffers": trained_buffers.checks,
    "timed steps": timed_steps.checks,
    "moves": moves.checks,
    "run": run.checks,
    "held out": held_out.checks,
}


def all_checks(case: Case) -> Iterator[Check]:
    """Yields all checks, kind by kind."""
    for kind, checks in KINDS.items():
        yield from (replace(check, kind=kind) for check in checks(case))
