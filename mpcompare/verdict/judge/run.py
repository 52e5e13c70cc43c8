"""Is training as near as one more correct run would be?

- *Value.* The largest difference from amp's loss in training, and the distance from amp's weights after training.
- *Limit.* The difference that one more correct run may have ([how](verdict.md)).
"""

import math
from dataclasses import dataclass

import numpy as np

from mpcompare.verdict.judge import promises
from mpcompare.verdict.judge.buffers import Buffers
from mpcompare.verdict.judge.check import Case, Check, Checks
from mpcompare.verdict.judge.held_out import HeldOut
from mpcompare.verdict.judge.limits import FP32
from mpcompare.verdict.judge.moves import Moves
from mpcompare.verdict.judge.trajectories import common_steps, jump, loss_apart, noise_factor

LOSS = "loss over the run"


@dataclass(frozen=True)
class NoiseRun:
    """Training once more, under changes that must not matter."""

    change: str  # the changes in words
    losses: list[float]  # step by step
    skipped: list[bool]  # step by step
    moved: dict[str, list[float]]  # the change of each parameter, as a sketch
    buffers: Buffers  # the buffers that training moved, as training left them
    held_out: HeldOut | None  # loss and accuracy after it; None where there are no such samples
    moves: Moves  # how far each of its steps moved the weights


def checks(case: Case) -> Checks:
    """Yields checks of the losses up to the step where correct runs part, and of the weights if they do not part.

    The differences of correct runs grow along the one direction that grows fastest, so their length is one number. The
    limit for one more run is ``noise_factor`` times the standard deviation of the sample.

    In fp32 roundings are so small that a unit at its kink turns in some runs and not in others. It moves everything
    after it by a jump, which a sample of three runs may not hold. So losses in fp32 may differ by the root of the unit
    roundoff, which is where runs are said to part. The distance of the weights, which moves more, is not compared
    there.
    """
    run, reference, again = case.run, case.reference, case.reference.findings.noise
    if case.is_reference or not again or promises.change_training(run):
        return
    factor = noise_factor(case.reference)
    if steps := common_steps(reference, run):
        losses = np.array([reference.steps["loss"][:steps], *(a.losses[:steps] for a in again)], dtype=float)
        difference, noise = loss_apart(run, reference).to_numpy()[:steps], float(losses.std(axis=0, ddof=1).max())
        largest = float(reference.steps["loss"].abs().iloc[:steps].max())
        limit = max(factor * noise + 4 * FP32 * largest, jump(reference) * largest)
        apart = float(difference.max())
        because = f"the loss is up to {apart:.1e} away from the loss of {reference.name}, which varies by {noise:.1e}"
        yield Check(LOSS, apart, limit, "run", because)
    if steps == len(reference.steps) and not jump(reference):
        yield _weights(case, factor)


def _weights(case: Case, factor: float) -> Check:
    """Returns one check of all weights: in a bias with two numbers alone, runs may be close by luck."""
    findings = case.reference.findings
    sketches = [case.run.findings.moved, findings.moved, *(again.moved for again in findings.noise)]
    own, *correct = (np.concatenate([sketch[name] for name in findings.moved]) for sketch in sketches)
    noise = math.sqrt(float(np.var(correct, axis=0, ddof=1).sum()))
    distance = float(np.linalg.norm(own - correct[0]))
    norm = findings.resume.weights if findings.resume else 0.0
    limit = factor * noise + len(case.reference.steps) * FP32 * norm
    because = f"the weights are {distance:.1e} away from the weights of {case.reference.name} after training, "
    return Check("weights after the run", distance, limit, "run", f"{because}which vary by {noise:.1e}")
