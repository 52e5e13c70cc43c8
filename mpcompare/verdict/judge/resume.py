"""Does a backend that is loaded go on as the one that saved?

- *Value.* A new backend loads the state of another. Each entry of both states is compared. Then loss scale, loss,
  gradients, buffers and weights of one more step of both are compared.
- *Limit.* State and loss scale exactly. Loss, gradients and buffers as `later steps`. The weights may differ by 8 u of
  how far they moved, and by 2^-23 of the weights. Under Adam it is 2 sqrt(8 u), because the sign of a gradient next to
  0 may turn.
- *The update* is also replayed from the loaded state.
"""

import math
from dataclasses import dataclass, field, replace

from mpcompare.verdict.judge import optimizer
from mpcompare.verdict.judge.buffers import of_step
from mpcompare.verdict.judge.causes import Pass
from mpcompare.verdict.judge.check import Case, Check, Checks, listed
from mpcompare.verdict.judge.drive import Gradients, NextScale
from mpcompare.verdict.judge.errors import Errors
from mpcompare.verdict.judge.gradients import gradient_checks
from mpcompare.verdict.judge.limits import FP32, update_part
from mpcompare.verdict.judge.trained import TrainedUpdate


@dataclass(frozen=True)
class Reload:
    """A backend that loaded the state of another backend, which saved it. Both are compared one step later."""

    step: Gradients  # the gradients of the backend that loaded, compared with the gradients of the one that saved
    next_scale: NextScale  # the loss scale after the step; the backend that saved says what it should be
    error: float  # the distance of their weights
    norm: float  # the distance that the weights of the backend that saved moved in the step
    lost: list[str]  # the entries of the state that are others in the loaded backend
    weights: float  # the norm of the weights of the backend that saved, after the step
    update: TrainedUpdate | None  # of the backend that loaded, replayed from the state; None if nothing can replay it
    buffers: Errors = field(default_factory=dict)  # the errors of its buffers, compared with the other's


def checks(case: Case) -> Checks:
    """Yields checks of the pass ``resume``: weights are equal but for the order of sums.

    Either backend then rounds each new weight once, by at most 2^-24 of it. So updates that hardly differ, as the sums
    of a GPU's atomics do, may end at two neighbouring numbers. In fp32 that is more than 8 u of the distance.
    """
    run, reload, reference = case.run, case.run.findings.resume, case.reference.findings.resume
    if reload is None:
        return
    because = f"a backend that loads a state has another one then: {listed(reload.lost)}"
    yield Check("state after a reload", float(len(reload.lost)), 0, "resume", because)
    scale, should_scale = reload.next_scale.loss_scale, reload.next_scale.should_scale
    because = f"loss scale {scale:g} after a reload and a step, {should_scale:g} without the reload"
    yield Check("loss scale after a reload", float(should_scale != scale), 0, "resume", because)
    if reference:
        yield from gradient_checks(case, "after a reload", Pass(reload.step, reference.step), {}, "resume")
        for check in of_step(case, "a step after a reload", reload.buffers, reference.buffers, {}):
            yield replace(check, cause="resume")
    if math.isfinite(reload.norm):
        limit = update_part(run, run.unit_roundoff) * reload.norm + 2 * FP32 * reload.weights
        because = f"weights a step after a reload are {reload.error:.1e} away from those without the reload"
        yield Check("weights after a reload", reload.error, limit, "resume", because)
    for check in optimizer.of_passes(run, {"resume": reload.update.drive} if reload.update else {}):
        yield replace(check, cause="resume") if check.cause == "optimizer" else check
