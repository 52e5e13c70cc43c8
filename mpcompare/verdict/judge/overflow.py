"""Do gradients overflow where amp's do?

- *Value.* The steps whose gradients hold inf or NaN.
- *Limit.* Exactly the same steps as amp's, where the scale is far too large or an input is infinite. In the first step
  one more or less, because the last digit decides. In training 4 standard deviations of a count, until correct runs
  part.
- *In parts.* If a backend computes a batch in parts, its sums are smaller, at most by the number of rows. So its
  gradients may be finite at a scale that is larger by this factor.
"""

import math
from collections.abc import Sequence

from mpcompare.precision import PRECISIONS
from mpcompare.verdict.judge.check import Case, Check, Checks, Examined
from mpcompare.verdict.judge.drive import Drive, Step
from mpcompare.verdict.judge.trajectories import common_steps, draws_alike


def checks(case: Case) -> Checks:
    """Yields checks of the skipped training steps, and of the passes ``first``, ``overflow`` and ``infinite
    input``.

    A backend may hold gradients in fp16 which the reference holds in fp32. A scale that multiplies all logits has such
    a gradient, and so has a network that autocast leaves in fp32. The backend overflows as long as the exact gradients
    times the loss scale do. Such steps are not counted.
    """
    if case.is_reference or case.run.findings.promises.loss_scale:
        return
    yield _in_training(case)
    if not case.run.findings.first.gradients:  # nothing shows whether they were finite
        return
    for where in ("first", "overflow", "infinite input"):
        run, reference = (each.findings.drives.get(where) for each in (case.run, case.reference))
        if not (run and reference and run.steps and reference.steps):
            continue  # without loss scaling there is no pass overflow, and with it no pass infinite input
        steps = _comparable(reference, case)
        own, others = run.steps[:steps], reference.steps[:steps]
        found, expected = (sum(not step.finite for step in each) for each in (own, others))
        because = f"{found} steps of pass {where} overflow, of {case.reference.name} {expected}"
        if where != "first":
            other = [a for a, b in zip(own, others, strict=False) if a.finite != b.finite]
            wrong = sum(step.finite for step in other) + _without_need(case, other)
            yield Check(f"overflows of pass {where}", wrong, 0, "overflow", because)
        elif found >= expected:
            more = min(found - expected, _without_need(case, run.steps))
            yield Check(f"overflows of pass {where}", more, 1, "overflow", because)
        else:
            because = f"gradients are finite at a loss scale of {run.first_scale:g}, of {case.reference.name} at "
            because += f"{reference.first_scale:g}"
            value, limit = run.first_scale / reference.first_scale, _backs_off_by(reference) * _rows(case.run)
            yield Check("loss scale of pass first", value, limit, "overflow", because)


def _without_need(case: Case, steps: Sequence[Step]) -> int:
    """Returns how many steps overflow at a loss scale at which the exact first gradients fit the format."""
    gradients = case.reference.findings.first.gradients.values()
    largest = max((error.largest for error in gradients if error), default=0.0)
    maximum = PRECISIONS[case.run.precision].storage.maximum
    return sum(not step.finite and step.loss_scale * largest <= maximum for step in steps)


def _comparable(drive: Drive, case: Case) -> int:
    """Returns the number of steps in which a pass can be compared. All can, unless updates have no bound: then only the
    steps up to the first update can, because the weights after it may be anything."""
    every = len(drive.steps)
    if case.reference.findings.recipe.bounded:
        return every
    return next((number for number, step in enumerate(drive.steps, start=1) if step.finite), every)


def _in_training(case: Case) -> Check:
    run, reference = case.run, case.reference
    alike = run.start == reference.start and draws_alike(run, reference)
    steps = common_steps(reference) if alike else 0
    skipped, expected = (int(each.steps["skipped"].iloc[:steps].sum()) for each in (run, reference))
    because = f"{skipped} of the first {steps} training steps skipped, of {reference.name} {expected}"
    limit = 4 * math.sqrt(max(expected, 1))  # the number varies as Poisson's distribution does
    if skipped < expected:  # the scale of a backend that takes each row by itself may back off so many times less
        limit += math.log(_rows(run)) / math.log(_backs_off_by(reference.findings.first))
    return Check("skipped training steps", abs(skipped - expected), limit, "overflow", because)


def _rows(run: Examined) -> int:
    """Returns the rows that forward and backward see at once."""
    return run.findings.recipe.batch_size // run.findings.recipe.accumulate


def _backs_off_by(drive: Drive) -> float:
    """Returns the factor by which the loss scale was divided when it backed off; 2, as usual, where it never was."""
    pairs = zip(drive.steps, drive.steps[1:], strict=False)
    return next((a.loss_scale / b.loss_scale for a, b in pairs if a.loss_scale > b.loss_scale), 2.0)
