"""The first change of the weights beside the one that the oracle's gradients make."""

import math
from collections.abc import Iterator
from dataclasses import replace

from mpcompare.verdict.judge.check import Case, Check
from mpcompare.verdict.judge.limits import FP32, stored_coarsely, tensor_limit


def checks(case: Case) -> Iterator[Check]:
    """Yields a check for each tensor: as for gradients, and one rounding of the weights.

    That holds where an update is linear in the gradients. Adam divides each by the root of its square, and one next to
    0 that turns its sign changes the update by 2 lr.
    """
    run, reference = case.run.findings.first.finite, case.reference.findings.first.finite
    if case.is_reference or not case.run.findings.recipe.linear or run is None or reference is None:
        return
    if not run.first_update or "first" in case.run.findings.replays:  # of other masks; or each layer was seen
        return
    clipping = _norm_error(case)
    for name, e in reference.first_update.items():
        gain = e.gain  # the first change is the gradient times this, and the decay
        rounding = case.run.findings.rounding.get(name)
        limit = tensor_limit(case.run, e, rounding and replace(rounding, error=gain * rounding.error))
        limit += (FP32 + stored_coarsely(case.run)) * e.weights
        gradient = reference.gradients.get(name)
        limit += clipping * gain * (gradient.norm if gradient else 0.0)
        error = run.first_update[name].error if name in run.first_update else math.inf
        because = f"the first change of {name} is off by {error / e.norm if e.norm else math.inf:.1e} of its norm"
        yield Check(f"first change, {name}", error, limit, "optimizer", because)


def _norm_error(case: Case) -> float:
    """Returns how far the clip factor of right gradients may be from that of the oracle's, relatively: as far as their
    norm, and a norm is no further away than its vector is. 0 where nothing is clipped."""
    recipe, findings, roundings = case.run.findings.recipe, case.reference.findings, case.run.findings.rounding
    errors = {name: e for name, e in findings.first.gradients.items() if e}
    if recipe.clip_norm is None or not errors:
        return 0.0
    error = math.hypot(*(tensor_limit(case.run, e, roundings.get(name)) for name, e in errors.items()))
    if recipe.clip_norm_type == math.inf:
        norm = max(e.largest for e in errors.values())
    else:
        norm = math.hypot(*(e.norm for e in errors.values()))
    clipped = norm + error > recipe.clip_norm
    return error / norm if clipped and norm else 0.0
