"""A backend that loaded the state of another has it, and goes on as that one does."""

import math
from collections.abc import Iterator

from mpcompare.verdict.judge import optimizer, resume_tensors
from mpcompare.verdict.judge.check import Case, Check, listed
from mpcompare.verdict.judge.limits import FP32, reordered_loss


def checks(case: Case) -> Iterator[Check]:
    """Yields checks of the pass ``reload``: state and loss scale exactly; loss and weights but for the order of sums,
    as each activation may be rounded once more or less.

    Gradients that differ by 8 u make updates that do, where these are linear in them. Adam's are next to ``lr`` times
    the gradient's sign: of those within 8 u of 0, about a part 8 u, the sign may turn, which is 2 lr, and the root of
    that part times 2 of their norm. Either backend then rounds each new weight once, by at most 2^-24 of it: updates
    that differ by nearly nothing, as the sums of a GPU's atomics do, may end at two neighbouring numbers. In fp32 that
    is more than 8 u of the distance.
    """
    run, reload = case.run, case.run.findings.reload
    if reload is None:
        return
    because = f"a backend that loads a state has another one then: {listed(reload.lost)}"
    yield Check("state after a reload", float(len(reload.lost)), 0, "resume", because)
    expected, after = reload.expected, reload.found
    because = f"loss scale {after.loss_scale:g} after a reload and a step, {expected.loss_scale:g} without the reload"
    difference = float(expected.loss_scale != after.loss_scale)
    yield Check("loss scale after a reload", difference, 0, "resume", because)
    if math.isfinite(expected.loss):
        because = f"the loss of the step after a reload is {after.loss:.9g}, without the reload {expected.loss:.9g}"
        error, limit = abs(expected.loss - after.loss), reordered_loss(run, expected.loss)
        yield Check("loss after a reload", error, limit, "resume", because)
    if math.isfinite(reload.norm):
        part = 8 * run.unit_roundoff
        limit = (part if run.findings.recipe.linear else 2 * math.sqrt(part)) * reload.norm
        limit += 2 * FP32 * reload.weights
        because = f"weights a step after a reload are {reload.error:.1e} away from those without the reload"
        yield Check("weights after a reload", reload.error, limit, "resume", because)
    yield from resume_tensors.checks(run)
    if reload.update:
        yield from optimizer.of_passes(run, {"reload": reload.update.drive})
