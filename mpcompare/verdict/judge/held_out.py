"""Is the trained network as good as correct runs make it?

- *Value.* Loss and accuracy in fp32 after training, on a sixteenth as many held-out samples as training saw.
- *Limit.* As `run`. An accuracy is a count over the targets, so its standard deviation is no less than the root of
  1/12. Where correct runs part, accuracies are compared if all of them have learned.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpcompare.verdict.judge import promises
from mpcompare.verdict.judge.check import Case, Check, Checks
from mpcompare.verdict.judge.limits import FP32
from mpcompare.verdict.judge.trajectories import common_steps, jump, noise_factor


@dataclass(frozen=True)
class HeldOut:
    """The network after training, in fp32 on some held-out samples."""

    loss: float  # the mean over the samples
    accuracy: float | None  # None where the targets are no classes
    targets: int  # the number of targets that count, of which the accuracy is a share


def checks(case: Case) -> Checks:
    """Yields a check of loss and accuracy. The reference and its noise runs are the sample, as in the check of the run.

    Where runs part, the loss has no upper limit. It must be finite if the last loss of training is finite. Before
    correct runs have learned, a network may say anything, and all of them may say the same.
    """
    run, reference = case.run.findings.held_out, case.reference.findings.held_out
    noisy = case.reference.findings.noise
    again = [each.held_out for each in noisy if each.held_out]
    if case.is_reference or run is None or reference is None or not again or len(again) < len(noisy):
        return
    if promises.kept(case.run) or case.run.start != case.reference.start:
        return
    if not math.isfinite(case.run.steps["loss"].iloc[-1]):  # the check of the run's losses sees that training diverged
        return
    correct = [reference, *again]
    losses = [each.loss for each in correct]
    together = common_steps(case.reference, case.run) == len(case.reference.steps)
    if all(map(math.isfinite, losses)):
        noise = float(np.std(losses, ddof=1)) if together else math.inf
        yield _check(case, "loss", run.loss, losses, noise, max(4 * FP32, jump(case.reference)) * abs(reference.loss))
    accuracies = [each.accuracy for each in correct if each.accuracy is not None]
    trainings = [list(case.reference.steps["loss"]), *(each.losses for each in noisy)]
    comparable = together or all(map(_has_learned, trainings))
    if comparable and run.accuracy is not None and len(accuracies) == len(correct):
        noise = max(float(np.std(accuracies, ddof=1)), 1 / math.sqrt(12) / reference.targets)
        yield _check(case, "accuracy", run.accuracy, accuracies, noise, 0.0)


def _has_learned(losses: Sequence[float]) -> bool:
    """Returns whether training has lowered the loss: its last quarter has a smaller mean than its first quarter."""
    quarter = max(len(losses) // 4, 1)
    return float(np.mean(losses[-quarter:])) < float(np.mean(losses[:quarter]))


def _check(case: Case, what: str, own: float, correct: list[float], noise: float, slack: float) -> Check:
    name, limit = case.reference.name, noise_factor(case.reference) * noise + slack
    because = f"the {what} on held-out samples is {own:.5g} after training, and {correct[0]:.5g} in {name}, which "
    because += f"varies by {noise:.1e}"
    difference = abs(own - correct[0]) if math.isfinite(own) else math.nan
    return Check(f"held-out {what}", difference, limit, "held-out samples", because)
