"""Does the loss scale follow its policy, and do skipped steps leave the weights as they are?

- *Value.* The loss scale before each step and after the last; whether a step was skipped; whether weights moved.
- *Limit.* Exactly what the policy says, in training and in the first steps. Six more steps begin with a scale that is
  just too large, then grow, then get an infinite input.
- *Without a loss scale* the infinite input is a last step. torch.amp takes it, so weights become NaN. A backend that
  leaves it out without a word differs.
- *Micro-batches.* No weight moves before the gradients of the last micro-batch are there.
"""

from dataclasses import dataclass

from mpcompare.verdict.judge.check import Case, Check, Checks
from mpcompare.verdict.judge.drive import Drive, NextScale


@dataclass(frozen=True)
class WrongScale(NextScale):
    """The loss scale before the first training ``step``, from 1, at which the scale is not its policy's."""

    step: int


def checks(case: Case) -> Checks:
    """Yields checks of the training steps, and of each step of the passes ``first`` and ``overflow``."""
    findings = case.run.findings
    wrong = findings.loss_scale
    if wrong is None:
        yield _scale("in training step every", 1.0, 1.0)
    else:
        yield _scale(f"in training step {wrong.step}", wrong.loss_scale, wrong.should_scale)
    for name, drive in findings.drives.items():
        yield from of_pass(name, drive)


def of_pass(name: str, drive: Drive) -> Checks:
    """Yields the checks of one pass. A step that is taken, and moves nothing, is left to the check of the update
    (optimizer.py), which tells more."""
    for number, step in enumerate(drive.steps, start=1):
        where = f"in step {number} of pass {name}"
        yield _scale(where, step.loss_scale, step.should_scale)
        gradients = f"{'finite' if step.finite else 'inf or NaN in the'} gradients {where}"
        if step.finite_after_clip and not step.finite:
            gradients += ", which clipping makes finite"
        because = f"{gradients}, and it {'says' if step.skipped else 'does not say'} that it skipped"
        yield Check(f"skip {where}", float(step.skipped != step.should_skip), 0, "skip", because)
        if step.should_skip or step.skipped:
            because = f"{gradients}, and the weights {'changed' if step.moved else 'did not change'}"
            yield Check(f"weights {where}", float(step.moved == step.should_skip), 0, "skip", because)
        because = f"weights changed {where} before the gradients of all micro-batches were there"
        yield Check(f"micro-batches {where}", float(step.moved_early), 0, "accumulation", because)
    if drive.next_scale:
        yield _scale(f"after pass {name}", drive.next_scale.loss_scale, drive.next_scale.should_scale)


def _scale(name: str, scale: float, expected: float) -> Check:
    because = f"loss scale {scale:g} {name}, where the policy says {expected:g}"
    return Check(f"loss scale {name}", float(scale != expected), 0, "loss scale", because)
